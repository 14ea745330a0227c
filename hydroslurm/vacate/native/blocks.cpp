/* Which addresses have memory, and which blocks are allocated. */
#include <errno.h>

#include <new>

#include "internal.h"

namespace {

constexpr size_t kRangeBytes = 64ull << 30;
constexpr size_t kSmallSegment = 32u << 20;
constexpr size_t kLargeBlock = 8u << 20; /* and more: segments of their own, lest a small block keeps a large one from leaving */
constexpr size_t kIdleBytes = 256u << 20; /* a host keeps so much without a live block, or as much as lives */

using Lock = std::lock_guard<std::mutex>;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) & ~(to - 1); }

int add_range(hs_arena *arena, size_t bytes) {
    const int n = arena->n_ranges.load();
    if (n == hs_arena::kRanges) return -ENOMEM;
    const size_t size = bytes > kRangeBytes ? bytes : rounded(kRangeBytes, arena->driver->granularity);
    uintptr_t at = 0;
    if (const int error = DRIVER(arena, reserve, size, &at)) return error;
    arena->ranges[n] = {at, size};
    arena->holes[at] = size;
    arena->n_ranges.store(n + 1);
    return 0;
}

int take_addresses(hs_arena *arena, size_t bytes, uintptr_t *at) {
    for (int tries = 0; tries < 2; ++tries) {
        for (auto hole = arena->holes.begin(); hole != arena->holes.end(); ++hole) {
            if (hole->second < bytes) continue;
            *at = hole->first;
            if (hole->second > bytes) arena->holes[hole->first + bytes] = hole->second - bytes;
            arena->holes.erase(hole);
            return 0;
        }
        if (const int error = add_range(arena, bytes)) return error;
    }
    return -ENOMEM;
}

void give_addresses(hs_arena *arena, uintptr_t at, size_t bytes) {
    auto next = arena->holes.lower_bound(at);
    if (next != arena->holes.end() && next->first == at + bytes) {
        bytes += next->second;
        next = arena->holes.erase(next);
    }
    if (next != arena->holes.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == at) {
            before->second += bytes;
            return;
        }
    }
    arena->holes[at] = bytes;
}

FreeKey key_of(uintptr_t at, const Block &block) {
    return {block.segment->large, block.segment->stream, block.bytes, at};
}

int make_piece(hs_arena *arena, hs_vm *piece) {
    if (const int error = DRIVER(arena, create, piece)) return error;
    int error = DRIVER(arena, map, piece);
    if (error) {
        if (DRIVER(arena, release, piece)) arena->leaked_bytes += piece->bytes;
        return error;
    }
    error = DRIVER(arena, open, piece);
    if (error && (DRIVER(arena, unmap, piece) || DRIVER(arena, release, piece))) arena->leaked_bytes += piece->bytes;
    return error;
}

int add_segment(hs_arena *arena, size_t bytes, bool large, uint64_t stream, int flags) {
    auto made = std::make_unique<Segment>();
    made->vm.bytes = rounded(large ? bytes : kSmallSegment, arena->driver->granularity);
    made->large = large;
    made->stream = stream;
    made->captured = flags & HS_CAPTURED;
    if (const int error = take_addresses(arena, made->vm.bytes, &made->vm.at)) return error;
    if (const int error = make_piece(arena, &made->vm)) {
        give_addresses(arena, made->vm.at, made->vm.bytes);
        return error;
    }
    const uintptr_t at = made->vm.at;
    const Block whole = {made->vm.bytes, true, made.get()};
    arena->mapped_bytes += made->vm.bytes;
    arena->idle_bytes += made->vm.bytes;
    arena->n_segments += 1;
    arena->free_blocks.insert(key_of(at, whole));
    arena->blocks[at] = whole;
    arena->segments[at] = std::move(made);
    return 0;
}

/* Give back what has no live block; true if there was anything. */
bool drop_idle(hs_arena *arena) {
    std::vector<Segment *> idle;
    for (auto &one : arena->segments)
        if (idles(*one.second)) idle.push_back(one.second.get());
    if (idle.empty() || DRIVER(arena, synchronize)) return false;
    bool any = false;
    for (Segment *segment : idle) any = segment_drop(arena, segment) == 0 || any;
    return any;
}

void *carve(hs_arena *arena, std::set<FreeKey>::iterator found, size_t bytes) {
    const uintptr_t at = std::get<3>(*found);
    arena->free_blocks.erase(found);
    Block &block = arena->blocks[at];
    Segment *segment = block.segment;
    if (block.bytes > bytes) {
        const Block rest = {block.bytes - bytes, true, segment};
        arena->blocks[at + bytes] = rest;
        arena->free_blocks.insert(key_of(at + bytes, rest));
        block.bytes = bytes;
    }
    if (segment->used == 0) arena->idle_bytes -= segment->vm.bytes;
    segment->used += bytes;
    arena->live_bytes += bytes;
    block.free = false;
    return reinterpret_cast<void *>(at);
}

/* Join with free neighbors of the same segment. */
std::map<uintptr_t, Block>::iterator joined(hs_arena *arena, std::map<uintptr_t, Block>::iterator block) {
    auto next = std::next(block);
    if (next != arena->blocks.end() && next->second.free && next->second.segment == block->second.segment) {
        arena->free_blocks.erase(key_of(next->first, next->second));
        block->second.bytes += next->second.bytes;
        arena->blocks.erase(next);
    }
    if (block == arena->blocks.begin()) return block;
    auto before = std::prev(block);
    if (!before->second.free || before->second.segment != block->second.segment) return block;
    arena->free_blocks.erase(key_of(before->first, before->second));
    before->second.bytes += block->second.bytes;
    arena->blocks.erase(block);
    return before;
}

} // namespace

int segment_drop(hs_arena *arena, Segment *segment) {
    if (const int error = DRIVER(arena, unmap, &segment->vm)) return error;
    if (DRIVER(arena, release, &segment->vm)) arena->leaked_bytes += segment->vm.bytes;
    arena->mapped_bytes -= segment->vm.bytes;
    segment_forget(arena, segment);
    return 0;
}

void segment_forget(hs_arena *arena, Segment *segment) {
    const uintptr_t at = segment->vm.at;
    const size_t bytes = segment->vm.bytes;
    auto block = arena->blocks.find(at); /* one, free: it has no live block */
    arena->free_blocks.erase(key_of(at, block->second));
    arena->blocks.erase(block);
    arena->idle_bytes -= bytes;
    arena->n_segments -= 1;
    arena->segments.erase(at);
    give_addresses(arena, at, bytes);
}

extern "C" {

int hs_arena_abi(void) { return HS_ARENA_ABI; }

int hs_arena_open(hs_arena **arena, hs_vm_driver *driver) {
    const auto power = [](size_t n) { return n != 0 && (n & (n - 1)) == 0; };
    if (!arena || !driver || !power(driver->granularity) || !power(driver->alignment)) return -EINVAL;
    *arena = new (std::nothrow) hs_arena(driver);
    return *arena ? touching_open(*arena) : -ENOMEM;
}

int hs_arena_alloc(hs_arena *arena, size_t bytes, uint64_t stream, int flags, void **block) {
    if (!arena || !block || bytes == 0 || bytes > (size_t{1} << 46)) return -EINVAL;
    const size_t wanted = rounded(bytes, arena->driver->alignment);
    const bool large = wanted >= kLargeBlock;
    Lock lock(arena->mutex);
    if (arena->state.load() != HS_RUNNING) return -EPROTO;
    for (int tries = 0; tries < 3; ++tries) {
        auto found = arena->free_blocks.lower_bound({large, stream, wanted, 0});
        if (found != arena->free_blocks.end() && std::get<0>(*found) == large && std::get<1>(*found) == stream) {
            *block = carve(arena, found, wanted);
            return 0;
        }
        const int error = add_segment(arena, wanted, large, stream, flags);
        const bool may_drop = tries == 0 && error == -ENOMEM && !arena->stuck.load() && !(flags & HS_CAPTURED);
        if (error && !(may_drop && drop_idle(arena))) return error; /* who waits for the device ends a capture */
    }
    return -ENOMEM;
}

int hs_arena_free(hs_arena *arena, void *block) {
    if (!arena) return -EINVAL;
    Lock lock(arena->mutex);
    auto found = arena->blocks.find(reinterpret_cast<uintptr_t>(block));
    if (found == arena->blocks.end() || found->second.free) return -ENOENT;
    Segment *segment = found->second.segment;
    segment->used -= found->second.bytes;
    arena->live_bytes -= found->second.bytes;
    found->second.free = true;
    found = joined(arena, found);
    arena->free_blocks.insert(key_of(found->first, found->second));
    if (segment->used != 0) return 0;
    arena->idle_bytes += segment->vm.bytes;
    /* a device's is kept for reuse: kernels that were launched may use it still */
    const size_t keep = std::max<size_t>(kIdleBytes, arena->live_bytes.load());
    const bool may = arena->driver->touched_by_threads && arena->state.load() == HS_RUNNING && !arena->stuck.load();
    if (may && idles(*segment) && arena->idle_bytes > keep) segment_drop(arena, segment);
    return 0;
}

int hs_arena_trim(hs_arena *arena) {
    if (!arena) return -EINVAL;
    Lock lock(arena->mutex);
    if (arena->state.load() != HS_RUNNING) return -EPROTO;
    if (arena->stuck.load()) return -EBUSY;
    drop_idle(arena);
    return 0;
}

int hs_arena_owns(const hs_arena *arena, const void *address) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    const int n = arena->n_ranges.load();
    for (int i = 0; i < n; ++i)
        if (at - arena->ranges[i].at < arena->ranges[i].bytes) return 1;
    return 0;
}

void hs_arena_stats(hs_arena *arena, hs_arena_numbers *numbers) {
    *numbers = {arena->live_bytes,   arena->mapped_bytes, arena->away_bytes, arena->staging_bytes,
                arena->leaked_bytes, arena->n_segments,   arena->touched,    arena->failed.load(),
                arena->why.load()};
}

} // extern "C"
