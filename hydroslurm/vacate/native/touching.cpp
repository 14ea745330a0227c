/* Threads that nobody holds (one that was asleep in numpy, say) may touch memory that is being copied, or is away. A device's
 * cannot be. A host's is read-only while it is copied, and inaccessible while it is away, so that SIGSEGV tells: the thread
 * waits for the copy, or brings the segment back itself, in the handler. It must not wait for the restore: it may hold the
 * interpreter's lock, which the restore's thread needs. */
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>

#include "internal.h"

namespace {

std::atomic<hs_arena *> watched{nullptr}; /* there is one with a host's memory */
std::atomic<bool> handed_on{false};
std::atomic<int> in_handler{0}; /* threads that may be reading the table */
std::atomic<bool> forking{false};
std::atomic<int> moving{0}; /* segments that are neither in place nor away */

Segment *segment_at(const std::vector<Segment *> &table, uintptr_t at) {
    auto past = std::upper_bound(table.begin(), table.end(), at,
                                 [](uintptr_t address, const Segment *one) { return address < one->vm.at; });
    if (past == table.begin()) return nullptr;
    Segment *found = *std::prev(past);
    return at - found->vm.at < found->vm.bytes ? found : nullptr;
}

void wait_a_little() {
    const timespec wait = {0, 200 * 1000};
    nanosleep(&wait, nullptr);
}

/* Returns for the instruction to be tried again. */
void set_right(hs_arena *arena, Segment *segment) {
    if (arena->at_work) return wait_a_little();
    if (segment->place.load() == kInPlace) { /* a failure has left it read-only */
        if (!segment->read_only.load()) return;
        if (DRIVER(arena, set_access, &segment->vm, HS_READ_WRITE)) return wait_a_little();
        segment->read_only.store(false);
        return;
    }
    int away = kAway;
    segment_begin(arena);
    if (!segment->place.compare_exchange_strong(away, kBusy)) {
        segment_end(arena, nullptr, 0);
        return wait_a_little();
    }
    const int error = segment_bring_back(arena, segment);
    segment_end(arena, segment, error ? kAway : kInPlace);
    if (error) return wait_a_little();
    arena->touched += 1;
}

/* Not ours: the instruction is tried again, and faults again, for whoever was there before. */
void hand_on(hs_arena *arena, int signo, const siginfo_t *info) {
    if (handed_on.exchange(true))
        signal(signo, SIG_DFL); /* who was there before has handed it on to us */
    else
        sigaction(signo, &arena->before, nullptr);
    if (info->si_code <= 0) raise(signo); /* sent by a process */
}

void on_fault(int signo, siginfo_t *info, void *) {
    const int kept = errno;
    in_handler += 1;
    hs_arena *arena = watched.load();
    const auto *table = arena->table.load();
    Segment *segment = table ? segment_at(*table, reinterpret_cast<uintptr_t>(info->si_addr)) : nullptr;
    if (segment)
        set_right(arena, segment);
    else
        hand_on(arena, signo, info);
    in_handler -= 1;
    errno = kept;
}

/* Not in the middle of a segment: in the child nobody would end that, and who touches it would wait for ever. */
void before_fork() {
    watched.load()->mutex.lock();
    watched.load()->turn.lock();
    forking.store(true);
    while (moving.load() != 0) wait_a_little();
}

void after_fork() {
    forking.store(false);
    watched.load()->turn.unlock();
    watched.load()->mutex.unlock();
}

/* A child has copies of its own, of the staging memory, too; it brings back what it touches. */
void after_fork_in_child() {
    hs_arena *arena = watched.load();
    arena->at_work.store(false);
    arena->stuck.store(true); /* and moves nothing itself */
    in_handler.store(0);
    after_fork();
}

} // namespace

void segment_begin(hs_arena *arena) {
    while (arena->driver->touched_by_threads) {
        moving += 1;
        if (!forking.load()) return;
        moving -= 1;
        wait_a_little();
    }
}

void segment_end(hs_arena *arena, Segment *segment, int place) {
    if (segment) segment->place.store(place);
    if (arena->driver->touched_by_threads) moving -= 1;
}

int touching_open(hs_arena *arena) {
    if (!arena->driver->touched_by_threads) return 0;
    watched.store(arena);
    static const int error = pthread_atfork(before_fork, after_fork, after_fork_in_child);
    return -error;
}

int touching_begin(hs_arena *arena) {
    if (!arena->driver->touched_by_threads) return 0;
    auto table = std::make_unique<std::vector<Segment *>>();
    {
        std::lock_guard<std::mutex> lock(arena->mutex);
        for (auto &one : arena->segments) table->push_back(one.second.get());
    }
    arena->table_kept = std::move(table);
    arena->table.store(arena->table_kept.get());
    handed_on.store(false);
    struct sigaction current, ours = {};
    sigaction(SIGSEGV, nullptr, &current);
    if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_fault) return 0;
    arena->before = current;
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    return sigaction(SIGSEGV, &ours, nullptr) ? -errno : 0;
}

/* All is in place. The handler stays, as a thread may be on its way into it. */
void touching_end(hs_arena *arena) {
    arena->table.store(nullptr);
    while (arena->driver->touched_by_threads && in_handler.load() != 0) wait_a_little();
}
