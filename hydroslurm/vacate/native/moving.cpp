/* Memory away and back: the four calls, and what is left where one of them fails. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "internal.h"

namespace {

constexpr size_t kSlice = 64u << 20; /* copied at a time, so that giving up is soon noticed */
using Lock = std::lock_guard<std::mutex>;

int begin(hs_arena *arena, int wanted, bool whole) {
    Lock lock(arena->turn);
    if (arena->at_work || (whole && arena->stuck.load())) return -EBUSY;
    if (arena->state.load() != wanted) return -EPROTO;
    arena->at_work = true;
    return 0;
}

void may_abandon(hs_arena *arena) {
    Lock lock(arena->turn);
    arena->abandoned.store(false);
    arena->may_abandon = true;
}

/* The end of the part that can be given up; false: it was. */
bool commit(hs_arena *arena) {
    Lock lock(arena->turn);
    arena->may_abandon = false;
    if (!arena->abandoned.load()) return true;
    arena->stuck.store(false);
    return false;
}

int end(hs_arena *arena, int state, int result) {
    Lock lock(arena->turn);
    arena->at_work = false;
    arena->state.store(state);
    return result;
}

/* --- where the copy goes */

int staging_free(hs_arena *arena, Staging *staging) {
    if (!staging->host) return 0;
    arena->staging_bytes -= staging->bytes;
    const int error = staging->spilled ? (munmap(staging->host, staging->bytes) ? -errno : 0)
                                       : DRIVER(arena, host_free, staging->host, staging->bytes);
    *staging = Staging();
    return error;
}

int spill_open(int fd, size_t bytes, void **host) {
    /* all of it now: a disk that is full must be an error here, not SIGBUS in the copy */
    if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes))) return -error;
    void *found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found == MAP_FAILED) return -errno;
    *host = found;
    return 0;
}

int staging_take(hs_arena *arena, size_t bytes, Staging *made) {
    const size_t wanted = std::max(bytes, arena->driver->granularity);
    *made = arena->staging;
    arena->staging = Staging();
    const bool spills = arena->spill_fd >= 0;
    if (made->host && made->bytes >= wanted && !made->spilled && !spills) return 0;
    staging_free(arena, made);
    void *host = nullptr;
    const int error = spills ? arena_noted(arena, "fallocate", spill_open(arena->spill_fd, wanted, &host))
                             : DRIVER(arena, host_alloc, wanted, &host);
    if (error) return error;
    *made = {host, wanted, spills};
    arena->staging_bytes += wanted;
    return 0;
}

/* Pinning is slow, so a device's is kept. A host's would keep what was to be freed. */
void staging_done(hs_arena *arena) {
    if (arena->staging.spilled || arena->driver->touched_by_threads) staging_free(arena, &arena->staging);
}

/* --- away */

struct Item {
    Segment *segment;
    std::vector<Span> spans;
    size_t offset; /* in the staging memory */
};

std::vector<Item> what_lives(hs_arena *arena, size_t *bytes) {
    Lock lock(arena->mutex);
    std::vector<Item> items;
    for (auto &one : arena->segments) {
        Segment *segment = one.second.get();
        items.push_back({segment, {}, *bytes});
        auto &spans = items.back().spans;
        const uintptr_t past = segment->vm.at + segment->vm.bytes;
        for (auto block = arena->blocks.find(one.first); block != arena->blocks.end() && block->first < past; ++block) {
            if (block->second.free) continue;
            const size_t offset = block->first - segment->vm.at, size = block->second.bytes;
            if (!spans.empty() && spans.back().offset + spans.back().bytes == offset)
                spans.back().bytes += size;
            else
                spans.push_back({offset, size});
            *bytes += size;
        }
    }
    return items;
}

int protect(hs_arena *arena, const std::vector<Item> &items) {
    if (!arena->driver->touched_by_threads) return 0;
    for (const Item &item : items) {
        item.segment->read_only.store(true); /* before: after a failure nobody knows */
        if (const int error = DRIVER(arena, set_access, &item.segment->vm, HS_READ)) return error;
    }
    return 0;
}

int unprotect(hs_arena *arena) {
    Lock lock(arena->mutex);
    int result = 0;
    for (auto &one : arena->segments) {
        Segment *segment = one.second.get();
        if (segment->place.load() != kInPlace || !segment->read_only.load()) continue;
        const int error = DRIVER(arena, set_access, &segment->vm, HS_READ_WRITE);
        if (!error) segment->read_only.store(false);
        result = result ? result : error;
    }
    return result;
}

int copy_all(hs_arena *arena, const std::vector<Item> &items, const Staging &staging) {
    for (const Item &item : items) {
        char *to = static_cast<char *>(staging.host) + item.offset;
        for (const Span &span : item.spans) {
            for (size_t done = 0; done < span.bytes;) {
                const size_t bytes = std::min(kSlice, span.bytes - done);
                if (arena->abandoned.load()) return -ECANCELED;
                if (const int error = DRIVER(arena, copy_to_host, &item.segment->vm, span.offset + done, to, bytes))
                    return error;
                done += bytes;
                to += bytes;
            }
        }
    }
    if (!staging.spilled) return 0;
    /* on the disk, and out of this process's memory */
    if (msync(staging.host, staging.bytes, MS_SYNC)) return arena_noted(arena, "msync", -errno);
    madvise(staging.host, staging.bytes, MADV_DONTNEED);
    if (arena->spill_fd >= 0) posix_fadvise(arena->spill_fd, 0, 0, POSIX_FADV_DONTNEED);
    return 0;
}

int take_away(hs_arena *arena, const std::vector<Item> &items, int64_t *freed) {
    for (const Item &item : items) {
        Segment *segment = item.segment;
        segment->staged = static_cast<const char *>(arena->staging.host) + item.offset;
        segment->spans = item.spans;
        segment_begin(arena);
        segment->place.store(kBusy);
        if (const int error = DRIVER(arena, unmap, &segment->vm)) {
            segment_end(arena, segment, kInPlace);
            return error;
        }
        const bool released = DRIVER(arena, release, &segment->vm) == 0;
        segment->created = segment->mapped = false;
        segment->read_only.store(false);
        arena->mapped_bytes -= segment->vm.bytes;
        arena->away_bytes += segment->vm.bytes;
        segment_end(arena, segment, kAway);
        if (released)
            *freed += segment->vm.bytes;
        else
            arena->leaked_bytes += segment->vm.bytes;
    }
    return 0;
}

int copy_out(hs_arena *arena, const std::vector<Item> &items, const Staging &staging) {
    int error = touching_begin(arena);
    if (!error) error = protect(arena, items);
    may_abandon(arena);
    return error ? error : copy_all(arena, items, staging);
}

} // namespace

/* The segment is this thread's: kBusy. Also in a signal handler. */
int segment_bring_back(hs_arena *arena, Segment *segment) {
    if (!segment->created) {
        if (const int error = DRIVER(arena, create, &segment->vm)) return error;
        segment->created = true;
    }
    if (!segment->mapped) {
        if (const int error = DRIVER(arena, map, &segment->vm)) return error;
        segment->mapped = true;
    }
    const char *from = segment->staged;
    for (const Span &span : segment->spans) {
        if (const int error = DRIVER(arena, copy_from_host, &segment->vm, span.offset, from, span.bytes)) return error;
        from += span.bytes;
    }
    if (const int error = DRIVER(arena, open, &segment->vm)) return error;
    arena->mapped_bytes += segment->vm.bytes;
    arena->away_bytes -= segment->vm.bytes;
    return 0;
}

extern "C" {

int hs_arena_spill(hs_arena *arena, int fd) {
    Lock lock(arena->turn);
    const int state = arena->state.load();
    if (arena->at_work || arena->stuck.load()) return -EBUSY;
    if (state != HS_RUNNING && state != HS_LOCKED) return -EPROTO;
    arena->spill_fd = fd;
    return 0;
}

int hs_arena_lock(hs_arena *arena) {
    if (const int error = begin(arena, HS_RUNNING, true)) return error;
    may_abandon(arena);
    const int error = DRIVER(arena, synchronize);
    if (!commit(arena)) return -ECANCELED;
    return end(arena, error ? HS_RUNNING : HS_LOCKED, error);
}

int hs_arena_checkpoint(hs_arena *arena, int64_t *freed_bytes) {
    *freed_bytes = 0;
    if (const int error = begin(arena, HS_LOCKED, true)) return error;
    size_t bytes = 0;
    const std::vector<Item> items = what_lives(arena, &bytes);
    Staging staging;
    if (const int error = staging_take(arena, bytes, &staging)) return end(arena, HS_LOCKED, error);
    int error = copy_out(arena, items, staging);
    if (!commit(arena)) { /* meanwhile the memory may have been unlocked: nothing of it is this call's any more */
        staging_free(arena, &staging);
        return -ECANCELED;
    }
    if (error) {
        staging_free(arena, &staging);
        unprotect(arena);
        return end(arena, HS_LOCKED, error);
    }
    arena->staging = staging;
    error = take_away(arena, items, freed_bytes);
    if (!error || arena->away_bytes.load() > 0) return end(arena, HS_CHECKPOINTED, error);
    staging_done(arena);
    unprotect(arena);
    return end(arena, HS_LOCKED, error);
}

int hs_arena_restore(hs_arena *arena) {
    if (const int error = begin(arena, HS_CHECKPOINTED, false)) return error;
    std::vector<Segment *> away;
    {
        Lock lock(arena->mutex);
        for (auto &one : arena->segments)
            if (!idles(*one.second)) away.push_back(one.second.get());
    }
    for (Segment *segment : away) {
        int place = kAway;
        segment_begin(arena);
        while (!segment->place.compare_exchange_strong(place, kBusy)) {
            segment_end(arena, nullptr, 0);
            if (place == kInPlace) break;
            usleep(100); /* a thread has touched it, and brings it back itself */
            place = kAway;
            segment_begin(arena);
        }
        if (place == kInPlace) continue;
        const int error = segment_bring_back(arena, segment);
        segment_end(arena, segment, error ? kAway : kInPlace);
        if (error) return end(arena, HS_CHECKPOINTED, error);
    }
    staging_done(arena);
    return end(arena, HS_LOCKED, 0);
}

int hs_arena_unlock(hs_arena *arena) {
    if (const int error = begin(arena, HS_LOCKED, false)) return error;
    if (const int error = unprotect(arena)) return end(arena, HS_LOCKED, error);
    touching_end(arena);
    Lock lock(arena->mutex);
    for (auto one = arena->segments.begin(); one != arena->segments.end();) {
        Segment *segment = (one++)->second.get();
        if (segment->place.load() != kAway) continue; /* else: it had no live block, and was not brought back */
        if ((segment->mapped && DRIVER(arena, unmap, &segment->vm)) ||
            (segment->created && DRIVER(arena, release, &segment->vm)))
            arena->leaked_bytes += segment->vm.bytes;
        arena->away_bytes -= segment->vm.bytes;
        segment_forget(arena, segment);
    }
    return end(arena, HS_RUNNING, 0);
}

int hs_arena_state(const hs_arena *arena) {
    auto *mine = const_cast<hs_arena *>(arena);
    Lock lock(mine->turn);
    return mine->at_work ? HS_MOVING : mine->state.load();
}

int hs_arena_abandon(hs_arena *arena) {
    Lock lock(arena->turn);
    if (!arena->at_work || !arena->may_abandon) return -EBUSY;
    arena->abandoned.store(true);
    arena->stuck.store(true);
    arena->may_abandon = arena->at_work = false; /* the state is the one before: nothing has changed */
    return 0;
}

} // extern "C"
