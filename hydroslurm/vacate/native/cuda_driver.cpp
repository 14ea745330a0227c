/* Physical memory of a device, by CUDA's virtual memory calls. libcuda is opened by the first use, never linked; the few
 * types of cuda.h that are needed are declared here, as its ABI has them (tests/vacate/native/cuda_abi.cpp compares). */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include <mutex>

#include "vm_driver.h"

namespace {

using Result = int; /* CUresult */
using DevicePtr = unsigned long long;

struct Location {
    int type; /* 1: CU_MEM_LOCATION_TYPE_DEVICE */
    int id;
};
struct AllocationProp { /* CUmemAllocationProp */
    int type;           /* 1: pinned */
    int requested_handle_types;
    Location location;
    void *win32_meta;
    struct {
        unsigned char compression, gpu_direct_rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
struct AccessDesc { /* CUmemAccessDesc */
    Location location;
    int flags; /* 3: read and write */
};
static_assert(sizeof(AllocationProp) == 32 && sizeof(AccessDesc) == 12, "as in cuda.h");

struct Api {
    Result (*init)(unsigned);
    Result (*device_get)(int *, int);
    Result (*attribute)(int *, int, int);
    Result (*retain)(void **, int);
    Result (*push)(void *);
    Result (*pop)(void **);
    Result (*synchronize)();
    Result (*granularity)(size_t *, const AllocationProp *, int);
    Result (*reserve)(DevicePtr *, size_t, size_t, DevicePtr, unsigned long long);
    Result (*create)(unsigned long long *, size_t, const AllocationProp *, unsigned long long);
    Result (*map)(DevicePtr, size_t, size_t, unsigned long long, unsigned long long);
    Result (*set_access)(DevicePtr, size_t, const AccessDesc *, size_t);
    Result (*unmap)(DevicePtr, size_t);
    Result (*release)(unsigned long long);
    Result (*to_host)(void *, DevicePtr, size_t);
    Result (*from_host)(DevicePtr, const void *, size_t);
    Result (*host_alloc)(void **, size_t, unsigned);
    Result (*host_free)(void *);
    Result (*capture_info)(void *, int *, unsigned long long *); /* the first version: those after it want more */
    Result (*stream_synchronize)(void *);
    Result (*exchange_mode)(int *);
    Result (*error_name)(Result, const char **);
};

constexpr int kHasVirtualMemory = 102; /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
constexpr int kHasDirectRdma = 110;    /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
constexpr int kRelaxed = 2;            /* CU_STREAM_CAPTURE_MODE_RELAXED */
constexpr int kPortable = 1;           /* CU_MEMHOSTALLOC_PORTABLE */
constexpr int kOutOfMemory = 2;

struct Device {
    hs_vm_driver driver;
    int number;
    int has_direct_rdma;
    void *context;
};

Api api;
Device devices[64];
std::mutex mutex;
const char *why_not = nullptr; /* null: not tried; "": it is there */

thread_local Result failed = 0;

int told(Result result) {
    if (result == 0) return 0;
    failed = result;
    return result == kOutOfMemory ? -ENOMEM : -EIO;
}

const char *why(void *) {
    const char *name = nullptr;
    return failed != 0 && api.error_name(failed, &name) == 0 && name ? name : "";
}

Device &of(void *self) { return *static_cast<Device *>(self); }

/* What is done here goes past a stream that is captured: torch captures in the mode "global", in which such calls of any
 * thread are errors and end the capture. */
struct Relaxed {
    int mode = kRelaxed;
    const int error = told(api.exchange_mode(&mode));
    ~Relaxed() {
        if (!error) api.exchange_mode(&mode);
    }
};

/* In the device's context: threads of ours have none yet, and one of torch's may have another device's. */
struct Inside {
    Relaxed relaxed;
    const int error;
    explicit Inside(void *self) : error(relaxed.error ? relaxed.error : told(api.push(of(self).context))) {}
    ~Inside() {
        void *context = nullptr;
        if (!error) api.pop(&context);
    }
};
#define INSIDE(self)          \
    const Inside inside(self); \
    if (inside.error) return inside.error

AllocationProp properties(const Device &device) {
    AllocationProp made;
    memset(&made, 0, sizeof made);
    made.type = 1;
    made.location = {1, device.number};
    made.flags.gpu_direct_rdma = device.has_direct_rdma != 0; /* or a network card cannot reach it */
    return made;
}

int reserve(void *self, size_t bytes, uintptr_t *at) {
    DevicePtr found = 0;
    INSIDE(self);
    if (const int error = told(api.reserve(&found, bytes, 0, 0, 0))) return error;
    *at = static_cast<uintptr_t>(found);
    return 0;
}

int create(void *self, hs_vm *piece) {
    const AllocationProp wanted = properties(of(self));
    INSIDE(self);
    unsigned long long handle = 0;
    const int error = told(api.create(&handle, piece->bytes, &wanted, 0));
    piece->handle = handle;
    return error;
}

int map(void *self, const hs_vm *piece) {
    INSIDE(self);
    if (const int error = told(api.map(piece->at, piece->bytes, 0, piece->handle, 0))) return error;
    const AccessDesc access = {{1, of(self).number}, 3};
    const int error = told(api.set_access(piece->at, piece->bytes, &access, 1));
    if (error) api.unmap(piece->at, piece->bytes);
    return error;
}

int open(void *, hs_vm *) { return 0; } /* no kernel runs before the unlock */
int set_access(void *, const hs_vm *, int) { return 0; }

int unmap(void *self, const hs_vm *piece) {
    INSIDE(self);
    return told(api.unmap(piece->at, piece->bytes));
}

int release(void *self, const hs_vm *piece) {
    INSIDE(self);
    return told(api.release(piece->handle));
}

int copy_to_host(void *self, const hs_vm *piece, size_t offset, void *host, size_t bytes) {
    INSIDE(self);
    return told(api.to_host(host, piece->at + offset, bytes));
}

int copy_from_host(void *self, const hs_vm *piece, size_t offset, const void *host, size_t bytes) {
    INSIDE(self);
    return told(api.from_host(piece->at + offset, host, bytes));
}

int synchronize(void *self) {
    INSIDE(self);
    return told(api.synchronize());
}

int host_alloc(void *self, size_t bytes, void **host) {
    INSIDE(self);
    return told(api.host_alloc(host, bytes, kPortable));
}

int host_free(void *self, void *host, size_t) {
    INSIDE(self);
    return told(api.host_free(host));
}

const char *load() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return "libcuda.so.1 cannot be opened: this node has no NVIDIA driver";
    const struct {
        const char *name;
        void *slot;
    } wanted[] = {
        {"cuInit", &api.init},
        {"cuDeviceGet", &api.device_get},
        {"cuDeviceGetAttribute", &api.attribute},
        {"cuDevicePrimaryCtxRetain", &api.retain},
        {"cuCtxPushCurrent_v2", &api.push},
        {"cuCtxPopCurrent_v2", &api.pop},
        {"cuCtxSynchronize", &api.synchronize},
        {"cuMemGetAllocationGranularity", &api.granularity},
        {"cuMemAddressReserve", &api.reserve},
        {"cuMemCreate", &api.create},
        {"cuMemMap", &api.map},
        {"cuMemSetAccess", &api.set_access},
        {"cuMemUnmap", &api.unmap},
        {"cuMemRelease", &api.release},
        {"cuMemcpyDtoH_v2", &api.to_host},
        {"cuMemcpyHtoD_v2", &api.from_host},
        {"cuMemHostAlloc", &api.host_alloc},
        {"cuMemFreeHost", &api.host_free},
        {"cuStreamGetCaptureInfo", &api.capture_info},
        {"cuStreamSynchronize", &api.stream_synchronize},
        {"cuThreadExchangeStreamCaptureMode", &api.exchange_mode},
        {"cuGetErrorName", &api.error_name},
    };
    for (const auto &one : wanted) {
        void *found = dlsym(library, one.name);
        if (!found) return "the NVIDIA driver has no virtual memory calls";
        memcpy(one.slot, &found, sizeof found);
    }
    return api.init(0) == 0 ? "" : "cuInit() of the NVIDIA driver failed: there is no device that this process may use";
}

/* Fills in the device; "": it can be used. Makes no context there: it may be another rank's device. */
const char *look_at(int number, Device *device, int *handle, size_t *granularity) {
    if (!why_not) why_not = load();
    if (*why_not) return why_not;
    int has = 0;
    if (number < 0 || number >= 64 || api.device_get(handle, number) != 0) return "there is no such CUDA device";
    if (api.attribute(&has, kHasVirtualMemory, *handle) != 0 || !has) return "the CUDA device has no virtual memory calls";
    device->number = number;
    if (api.attribute(&device->has_direct_rdma, kHasDirectRdma, *handle) != 0) device->has_direct_rdma = 0;
    const AllocationProp wanted = properties(*device);
    return api.granularity(granularity, &wanted, 0) == 0 ? "" : "the CUDA device cannot be used";
}

} // namespace

extern "C" const char *hs_cuda_why_not(int number) {
    std::lock_guard<std::mutex> lock(mutex);
    Device device = {};
    int handle = 0;
    size_t granularity = 0;
    return look_at(number, &device, &handle, &granularity);
}

extern "C" hs_vm_driver *hs_cuda_driver(int number, const char **why) {
    std::lock_guard<std::mutex> lock(mutex);
    Device found = {};
    if (number >= 0 && number < 64 && devices[number].context) return &devices[number].driver;
    int handle = 0;
    size_t granularity = 0;
    *why = look_at(number, &found, &handle, &granularity);
    if (**why) return nullptr;
    *why = "the CUDA device gives no context";
    if (api.retain(&found.context, handle) != 0) return nullptr;
    Device &device = devices[number] = found;
    device.driver = {&device, granularity, 512, 0, reserve, create, map, open, set_access, unmap, release,
                     copy_to_host, copy_from_host, synchronize, host_alloc, host_free, ::why};
    return &device.driver;
}

extern "C" int hs_cuda_capture(void *stream, uint64_t *id) {
    int status = 0;
    unsigned long long found = 0;
    *id = 0;
    if (const int error = told(api.capture_info(stream, &status, &found))) return error;
    if (status != 0) *id = found;
    return 0;
}

extern "C" int hs_cuda_stream_synchronize(void *stream) {
    const Relaxed relaxed;
    return relaxed.error ? relaxed.error : told(api.stream_synchronize(stream));
}
