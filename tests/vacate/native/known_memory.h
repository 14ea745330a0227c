/* Memory of an arena whose bits are known, and the way there and back. */
#ifndef KNOWN_MEMORY_H
#define KNOWN_MEMORY_H
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <map>

#include "arena.h"

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            _exit(1);                                                            \
        }                                                                        \
    } while (0)

namespace {

constexpr size_t kMiB = 1u << 20;

struct Memory {
    hs_arena *arena;
    std::map<uint64_t *, size_t> blocks; /* words */

    uint64_t *add(size_t bytes, uint64_t stream = 0, int flags = 0) {
        void *block = nullptr;
        CHECK(hs_arena_alloc(arena, bytes, stream, flags, &block) == 0);
        auto *words = static_cast<uint64_t *>(block);
        blocks[words] = bytes / 8;
        for (size_t i = 0; i < bytes / 8; ++i) words[i] = value(words, i);
        return words;
    }
    void remove(uint64_t *block) {
        blocks.erase(block);
        CHECK(hs_arena_free(arena, block) == 0);
    }
    static uint64_t value(const uint64_t *block, size_t i) { return reinterpret_cast<uintptr_t>(block) * 31 + i; }
    void check() const {
        for (const auto &one : blocks)
            for (size_t i = 0; i < one.second; ++i) CHECK(one.first[i] == value(one.first, i));
    }
};

[[maybe_unused]] hs_arena_numbers numbers(hs_arena *arena) {
    hs_arena_numbers found;
    hs_arena_stats(arena, &found);
    return found;
}

/* Three segments, with holes between what lives. */
[[maybe_unused]] Memory usual(hs_arena *arena) {
    Memory memory{arena, {}};
    memory.add(9 * kMiB);
    uint64_t *hole = memory.add(3 * kMiB);
    memory.add(512 * 1024 + 24);
    memory.add(12 * kMiB);
    memory.remove(hole);
    return memory;
}

[[maybe_unused]] int64_t away(hs_arena *arena) {
    int64_t freed = 0;
    CHECK(hs_arena_lock(arena) == 0);
    CHECK(hs_arena_checkpoint(arena, &freed) == 0);
    CHECK(hs_arena_state(arena) == HS_CHECKPOINTED);
    return freed;
}

[[maybe_unused]] void back(hs_arena *arena) {
    CHECK(hs_arena_restore(arena) == 0);
    CHECK(hs_arena_unlock(arena) == 0);
    CHECK(hs_arena_state(arena) == HS_RUNNING);
}

} // namespace
#endif
