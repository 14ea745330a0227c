/* The only source that knows torch: its allocations, served from arenas. */
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <errno.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "arena.h"

namespace {

constexpr uint8_t kPriority = 100; /* the default's is 0 */

hs_arena *cpu_arena = nullptr;
c10::Allocator *others = nullptr;
size_t least_bytes = 0;

void give_back(void *block) {
    if (!block) return;
    if (!hs_arena_owns(cpu_arena, block)) return others->raw_deallocate(block);
    c10::profiledCPUMemoryReporter().Delete(block);
    hs_arena_free(cpu_arena, block);
}

/* Small blocks stay where they were: they are no memory to speak of, and the heap is faster for them. So do those that
 * are asked for while the memory is away: nobody is made to wait, for it may hold the interpreter's lock. */
struct CpuAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void *block = nullptr;
        if (bytes >= least_bytes && hs_arena_alloc(cpu_arena, bytes, 0, 0, &block) == 0)
            c10::profiledCPUMemoryReporter().New(block, bytes);
        else
            block = bytes == 0 ? nullptr : others->raw_allocate(bytes);
        return {block, block, &give_back, at::Device(at::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

constexpr int kDevices = 64;
std::mutex mutex; /* of all below */
hs_arena *cuda_arenas[kDevices];
std::unordered_map<void *, std::set<void *>> other_streams; /* which record_stream() has named, by block */
std::map<std::pair<void *, uint64_t>, uint64_t> captures;   /* a number for each stream of each capture */

hs_arena *cuda_arena(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    const char *why = "";
    hs_vm_driver *driver = hs_cuda_driver(device, &why);
    TORCH_CHECK(driver, "hydroslurm's arena cannot be used on device ", device, ": ", why);
    if (!cuda_arenas[device]) TORCH_CHECK(hs_arena_open(&cuda_arenas[device], driver) == 0, "hydroslurm's arena");
    return cuda_arenas[device];
}

/* Who may reuse a block: the work of one stream in its order. That of a capture is done whenever its graph is replayed, so that
 * its blocks are for nobody else, ever; within it, one that was freed can be used again. */
uint64_t reuser(void *stream, int *flags) {
    uint64_t capture = 0;
    const int error = hs_cuda_capture(stream, &capture);
    TORCH_CHECK(error == 0, "hydroslurm's arena cannot tell whether a CUDA stream is being captured");
    if (capture == 0) return reinterpret_cast<uintptr_t>(stream);
    *flags |= HS_CAPTURED;
    std::lock_guard<std::mutex> lock(mutex);
    const uint64_t next = (uint64_t{1} << 63) + captures.size(); /* no address */
    return captures.emplace(std::make_pair(stream, capture), next).first->second;
}

} // namespace

extern "C" {

int hs_arena_serve_cpu(size_t floor, hs_arena **arena) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!cpu_arena) {
        if (const int error = hs_arena_open(&cpu_arena, hs_page_driver())) return error;
        least_bytes = floor ? floor : 1;
        others = c10::GetCPUAllocator();
        c10::SetCPUAllocator(new CpuAllocator, kPriority);
    }
    *arena = cpu_arena;
    return 0;
}

void *hs_arena_cuda_alloc(size_t bytes, int device, void *stream) {
    if (bytes == 0) return nullptr;
    hs_arena *arena = cuda_arena(device);
    void *block = nullptr;
    int flags = 0;
    const uint64_t stream_key = reuser(stream, &flags);
    const int error = hs_arena_alloc(arena, bytes, stream_key, flags, &block);
    if (error == 0) return block;
    hs_arena_numbers numbers;
    hs_arena_stats(arena, &numbers);
    const char *why = error == -EPROTO ? "its memory is away, in a pause that vacates" : numbers.why;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "hydroslurm's arena has no ", bytes, " bytes on device ", device, ": ",
                     *why ? why : strerror(-error), "; live ", numbers.live_bytes, ", mapped ", numbers.mapped_bytes, " bytes");
}

void hs_arena_cuda_record_stream(void *block, void *stream) {
    std::lock_guard<std::mutex> lock(mutex);
    other_streams[block].insert(stream);
}

void hs_arena_cuda_free(void *block, size_t, int device, void *) {
    if (!block) return;
    std::set<void *> streams;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = other_streams.find(block);
        if (found != other_streams.end()) {
            streams = std::move(found->second);
            other_streams.erase(found);
        }
    }
    for (void *stream : streams) { /* in a capture one must not wait: then it is never used again */
        uint64_t capture = 0;
        if (hs_cuda_capture(stream, &capture) || capture != 0 || hs_cuda_stream_synchronize(stream)) return;
    }
    hs_arena_free(cuda_arenas[device], block);
}

void hs_arena_cuda_empty_cache(void) {
    std::lock_guard<std::mutex> lock(mutex);
    for (hs_arena *arena : cuda_arenas)
        if (arena) hs_arena_trim(arena);
}

int hs_arena_cuda_arena(int device, hs_arena **arena) {
    std::lock_guard<std::mutex> lock(mutex);
    if (device < 0 || device >= kDevices || !cuda_arenas[device]) return -ENOENT;
    *arena = cuda_arenas[device];
    return 0;
}

const char *hs_arena_why_no_cuda(void) { return hs_cuda_why_not(0); }

} // extern "C"
