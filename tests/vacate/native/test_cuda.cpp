/* CUDA's driver of the arena over fake_cuda.cpp, which is opened as a libcuda.so.1 of LD_LIBRARY_PATH: `test_cuda NAME`. */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include <atomic>
#include <string>
#include <thread>

#include "internal.h"
#include "known_memory.h"

namespace {

void *library() {
    static void *found = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(found);
    return found;
}
template <class Function>
Function *symbol(const char *name) {
    auto *found = reinterpret_cast<Function *>(dlsym(library(), name));
    CHECK(found);
    return found;
}
void fail(const char *call, int nth, int result) { symbol<void(const char *, int, int)>("fake_cuda_fail")(call, nth, result); }
int pending() { return symbol<int()>("fake_cuda_pending")(); }
int64_t used() { return static_cast<int64_t>(symbol<size_t()>("fake_cuda_used")()); }
int64_t pinned() { return static_cast<int64_t>(symbol<size_t()>("fake_cuda_pinned")()); }
bool invalidated() { return symbol<int()>("fake_cuda_invalidated")() != 0; }
void capture(void *stream, int on) { symbol<void(void *, int)>("fake_cuda_capture")(stream, on); }

hs_arena *open_on_device() {
    const char *why = "";
    hs_vm_driver *driver = hs_cuda_driver(0, &why);
    CHECK(driver);
    CHECK(driver->granularity == 2u << 20 && !driver->touched_by_threads);
    hs_arena *arena = nullptr;
    CHECK(hs_arena_open(&arena, driver) == 0);
    return arena;
}

constexpr int kOutOfMemory = 2, kIllegalAddress = 700;
const char *const kNames[] = {"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_ILLEGAL_ADDRESS"};

/* --- the tests */

/* The device's memory goes, all of it, and comes back to its addresses; only what lives is copied, and pinned memory is
 * kept for the next time. */
void cycles() {
    hs_arena *arena = open_on_device();
    Memory memory = usual(arena);
    for (int i = 0; i < 5; ++i) {
        const int64_t before = used();
        CHECK(before == numbers(arena).mapped_bytes && before > 0);
        CHECK(away(arena) == before);
        CHECK(used() == 0 && numbers(arena).away_bytes == before);
        CHECK(pinned() == numbers(arena).staging_bytes && pinned() < int64_t(23 * kMiB)); /* not the hole */
        back(arena);
        memory.check();
        CHECK(used() == numbers(arena).mapped_bytes && pinned() == numbers(arena).staging_bytes);
    }
}

/* Each call of CUDA's fails once, at each place of a cycle, in two ways: nothing is lost, the next cycle works, and the
 * error's own name is told. */
void every_failure() {
    hs_arena *arena = open_on_device();
    Memory memory = usual(arena);
    for (const char *call : {"cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent_v2", "cuCtxSynchronize", "cuMemHostAlloc",
                             "cuMemcpyDtoH_v2", "cuMemUnmap", "cuMemRelease", "cuMemCreate", "cuMemMap", "cuMemSetAccess",
                             "cuMemcpyHtoD_v2"}) {
        int reached = 0;
        bool was_reached = true;
        for (int nth = 1; nth <= 6 && was_reached; ++nth) {
            for (const int result : {kOutOfMemory, kIllegalAddress}) {
                const bool pins = strcmp(call, "cuMemHostAlloc") == 0;
                if (pins) memory.add(2 * kMiB); /* more than the pinned memory has room for */
                const int64_t leaked = numbers(arena).leaked_bytes;
                fail(call, nth, result);
                int64_t freed = 0;
                int tries = 0, error = hs_arena_lock(arena);
                if (!error) {
                    error = hs_arena_checkpoint(arena, &freed);
                    const int state = hs_arena_state(arena);
                    CHECK(state == HS_CHECKPOINTED || (state == HS_LOCKED && error));
                    if (state == HS_LOCKED) CHECK(numbers(arena).away_bytes == 0);
                    while (hs_arena_state(arena) == HS_CHECKPOINTED) {
                        const int failed = hs_arena_restore(arena);
                        error = error ? error : failed;
                        CHECK(++tries < 4);
                    }
                    while (hs_arena_state(arena) == HS_LOCKED) CHECK(hs_arena_unlock(arena) == 0 || ++tries < 4);
                }
                was_reached = pending() <= 0;
                if (error || numbers(arena).leaked_bytes > leaked) {
                    ++reached;
                    CHECK(strcmp(numbers(arena).why, kNames[result == kIllegalAddress]) == 0);
                    CHECK(!error || error == (result == kOutOfMemory ? -ENOMEM : -EIO));
                }
                fail("", 0, 0);
                CHECK(hs_arena_state(arena) == HS_RUNNING);
                memory.check();
                CHECK(used() == numbers(arena).mapped_bytes + numbers(arena).leaked_bytes);
            }
        }
        CHECK(reached > 0);
    }
    away(arena);
    back(arena);
    memory.check();
}

/* Where no segment can be made, the caller is told, and the device has what it had. */
void no_segment() {
    hs_arena *arena = open_on_device();
    for (const char *call : {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
        void *block = nullptr;
        fail(call, 1, kIllegalAddress);
        CHECK(hs_arena_alloc(arena, 9 * kMiB, 0, 0, &block) == -EIO && block == nullptr);
        CHECK(strcmp(numbers(arena).why, "CUDA_ERROR_ILLEGAL_ADDRESS") == 0);
        CHECK(used() == 0 && numbers(arena).segments == 0);
    }
    Memory memory = usual(arena);
    memory.check();
}

/* Somebody else has the device's memory when it is to come back: nothing is lost, and the next try works. A training that
 * fills the device gets what idles, also for another stream. */
void full() {
    setenv("FAKE_CUDA_BYTES", "100000000", 1);
    hs_arena *arena = open_on_device();
    Memory memory = usual(arena);
    away(arena);
    hs_vm others = {0, 80 * kMiB, 0};
    hs_vm_driver *driver = arena->driver;
    CHECK(driver->create(driver->self, &others) == 0);
    CHECK(hs_arena_restore(arena) == -ENOMEM && hs_arena_state(arena) == HS_CHECKPOINTED);
    CHECK(strcmp(numbers(arena).why, kNames[0]) == 0);
    CHECK(driver->release(driver->self, &others) == 0);
    back(arena);
    memory.check();
    memory.remove(memory.add(40 * kMiB, 1));
    memory.add(40 * kMiB, 2);
    void *block = nullptr;
    CHECK(hs_arena_alloc(arena, 40 * kMiB, 3, 0, &block) == -ENOMEM);
    memory.check();
}

/* A segment that is made while a stream is being captured does not end the capture. What was captured is reused by the same
 * capture only, comes back from a vacate whether it lives or not, and is not given up for others. */
void captured() {
    setenv("FAKE_CUDA_BYTES", "100000000", 1);
    hs_arena *arena = open_on_device();
    Memory memory{arena, {}};
    int stream = 0;
    uint64_t id = 1;
    CHECK(hs_cuda_capture(&stream, &id) == 0 && id == 0);
    capture(&stream, 1);
    CHECK(hs_cuda_capture(&stream, &id) == 0 && id != 0);
    CHECK(hs_cuda_stream_synchronize(&id) == 0); /* of another one */
    uint64_t *one = memory.add(30 * kMiB, 77, HS_CAPTURED);
    memory.remove(one);
    CHECK(memory.add(30 * kMiB, 77, HS_CAPTURED) == one);
    memory.remove(one);
    memory.remove(memory.add(30 * kMiB, 1));
    void *block = nullptr;
    CHECK(hs_arena_alloc(arena, 50 * kMiB, 78, HS_CAPTURED, &block) == -ENOMEM); /* it must not wait for the device */
    CHECK(!invalidated());
    capture(&stream, 0);
    CHECK(hs_arena_alloc(arena, 70 * kMiB, 1, 0, &block) == -ENOMEM);
    memory.add(50 * kMiB, 1); /* the other 30 MiB are given up, not the graph's */
    const int64_t before = used();
    CHECK(away(arena) == before);
    back(arena);
    CHECK(used() == before);
    memset(one, 1, 30 * kMiB); /* a replay writes there */
    CHECK(hs_arena_trim(arena) == 0 && used() == before);
    memory.check();
}

/* What idles is given back when it is asked for, and while the memory is away nothing is. */
void trimming() {
    hs_arena *arena = open_on_device();
    Memory memory = usual(arena);
    const int64_t before = used();
    memory.remove(memory.add(64 * kMiB));
    CHECK(used() > before);
    CHECK(hs_arena_trim(arena) == 0 && used() == before);
    away(arena);
    CHECK(hs_arena_trim(arena) == -EPROTO);
    back(arena);
    memory.check();
}

/* Each step on the way to a device fails: there is none, a reason is told, and the next call finds it. */
void opening() {
    const char *why = nullptr;
    for (const char *call : {"cuDeviceGet", "cuDeviceGetAttribute", "cuMemGetAllocationGranularity", "cuDevicePrimaryCtxRetain"}) {
        if (why) fail(call, 1, 999);
        if (!why) CHECK(hs_cuda_driver(1, &why) == nullptr && strstr(why, "no such CUDA device"));
        fail(call, 1, 999);
        CHECK(hs_cuda_driver(0, &why) == nullptr && strlen(why) > 10);
    }
    CHECK(*hs_cuda_why_not(0) == 0 && *hs_cuda_why_not(1) && symbol<int()>("fake_cuda_retained")() == 0);
    CHECK(hs_cuda_driver(0, &why) != nullptr && hs_cuda_driver(0, &why) == hs_cuda_driver(0, &why));
    CHECK(symbol<int()>("fake_cuda_retained")() == 1);
}

void no_init() {
    const char *why = nullptr;
    fail("cuInit", 1, 100);
    CHECK(hs_cuda_driver(0, &why) == nullptr && strstr(why, "cuInit()"));
}

const struct {
    const char *name;
    void (*run)();
} kTests[] = {{"cycles", cycles},     {"every_failure", every_failure}, {"no_segment", no_segment}, {"full", full},
              {"captured", captured}, {"trimming", trimming},           {"opening", opening},       {"no_init", no_init}};

} // namespace

int main(int argc, char **argv) {
    alarm(60);
    for (const auto &one : kTests) {
        if (argc != 2) puts(one.name);
        if (argc == 2 && strcmp(argv[1], one.name) == 0) return one.run(), 0;
    }
    return argc != 2 ? 0 : 2;
}
