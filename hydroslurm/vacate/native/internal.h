/* What the arena's sources share: its tables, and which of them who may touch. */
#ifndef HYDROSLURM_ARENA_INTERNAL_H
#define HYDROSLURM_ARENA_INTERNAL_H

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "arena.h"

enum Place { kInPlace, kBusy, kAway };

struct Span { /* live blocks that lie side by side */
    size_t offset, bytes;
};

struct Segment {
    hs_vm vm{};
    uint64_t stream = 0;
    bool large = false, captured = false;
    size_t used = 0; /* bytes in its blocks that are allocated; by `mutex` */
    std::atomic<int> place{kInPlace};
    /* By whoever has set `place` to kBusy, or moves it. A return goes on from here after a failure. */
    bool created = true, mapped = true;
    std::atomic<bool> read_only{false};
    const char *staged = nullptr;
    std::vector<Span> spans;
};

struct Block {
    size_t bytes;
    bool free;
    Segment *segment;
};

/* It has no live block, and no graph uses it. */
inline bool idles(const Segment &segment) { return segment.used == 0 && !segment.captured; }

struct Staging {
    void *host = nullptr;
    size_t bytes = 0;
    bool spilled = false;
};

using FreeKey = std::tuple<bool, uint64_t, size_t, uintptr_t>; /* large, stream, bytes, address */

struct hs_arena {
    explicit hs_arena(hs_vm_driver *with) : driver(with) {}
    hs_vm_driver *driver;

    /* Addresses: set once, read without a lock. */
    static constexpr int kRanges = 256;
    struct {
        uintptr_t at;
        size_t bytes;
    } ranges[kRanges];
    std::atomic<int> n_ranges{0};

    /* `mutex`: blocks.cpp's. Never taken in a signal handler, nor held over a copy. */
    std::mutex mutex;
    std::map<uintptr_t, size_t> holes; /* addresses without a segment */
    std::map<uintptr_t, std::unique_ptr<Segment>> segments;
    std::map<uintptr_t, Block> blocks;
    std::set<FreeKey> free_blocks;
    size_t idle_bytes = 0; /* in segments without a live block */

    /* `turn`: which of the four calls is at work. Held for moments only, never over a driver's call. */
    std::mutex turn;
    std::atomic<int> state{HS_RUNNING};
    bool may_abandon = false;
    std::atomic<bool> at_work{false}, abandoned{false}, stuck{false};
    Staging staging;
    int spill_fd = -1;

    /* For the handler: sorted by address, unchanged while it is set. */
    std::atomic<const std::vector<Segment *> *> table{nullptr};
    std::unique_ptr<std::vector<Segment *>> table_kept;
    struct sigaction before {};

    std::atomic<int64_t> live_bytes{0}, mapped_bytes{0}, away_bytes{0}, staging_bytes{0}, leaked_bytes{0}, n_segments{0},
        touched{0};
    std::atomic<const char *> failed{""}, why{""};
};

/* A call of the driver's; remembers the name of one that fails. */
#define DRIVER(arena, call, ...) \
    arena_noted((arena), #call, (arena)->driver->call((arena)->driver->self, ##__VA_ARGS__))
inline int arena_noted(hs_arena *arena, const char *call, int error) {
    if (error == 0) return 0;
    arena->why.store(arena->driver->why ? arena->driver->why(arena->driver->self) : "");
    arena->failed.store(call);
    return error;
}

/* blocks.cpp; the mutex is held */
int segment_drop(hs_arena *arena, Segment *segment);
void segment_forget(hs_arena *arena, Segment *segment);
/* moving.cpp */
int segment_bring_back(hs_arena *arena, Segment *segment);
/* touching.cpp: what threads do with memory that is away, or is being copied */
/* Around the time that a segment is kBusy, so that no child is forked with one that is. */
void segment_begin(hs_arena *arena);
void segment_end(hs_arena *arena, Segment *segment, int place);
int touching_open(hs_arena *arena);
int touching_begin(hs_arena *arena);
void touching_end(hs_arena *arena);
#endif
