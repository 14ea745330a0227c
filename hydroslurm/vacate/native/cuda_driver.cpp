/* Physical memory of a device, by CUDA's virtual memory calls. libcuda is opened by the first use, never linked; the few
 * types of cuda.h that are needed are declared here, as its ABI has them. */
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
    Result (*set_current)(void *);
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
    Result (*is_capturing)(void *, int *);
    Result (*stream_synchronize)(void *);
};

constexpr int kHasVirtualMemory = 102; /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
constexpr int kOutOfMemory = 2;

struct Device {
    hs_vm_driver driver;
    int number;
    void *context;
};

Api api;
Device devices[64];
std::mutex mutex;
const char *why_not = nullptr; /* null: not tried; "": it is there */

int told(Result result) {
    if (result == 0) return 0;
    return result == kOutOfMemory ? -ENOMEM : -EIO;
}

Device &of(void *self) { return *static_cast<Device *>(self); }

/* Calls come from threads that have no context yet. */
int enter(void *self) { return told(api.set_current(of(self).context)); }

AllocationProp properties(int device) {
    AllocationProp made;
    memset(&made, 0, sizeof made);
    made.type = 1;
    made.location = {1, device};
    return made;
}

int reserve(void *self, size_t bytes, uintptr_t *at) {
    DevicePtr found = 0;
    if (const int error = enter(self)) return error;
    if (const int error = told(api.reserve(&found, bytes, 0, 0, 0))) return error;
    *at = static_cast<uintptr_t>(found);
    return 0;
}

int create(void *self, hs_vm *piece) {
    const AllocationProp wanted = properties(of(self).number);
    if (const int error = enter(self)) return error;
    unsigned long long handle = 0;
    const int error = told(api.create(&handle, piece->bytes, &wanted, 0));
    piece->handle = handle;
    return error;
}

int map(void *self, const hs_vm *piece) {
    if (const int error = enter(self)) return error;
    if (const int error = told(api.map(piece->at, piece->bytes, 0, piece->handle, 0))) return error;
    const AccessDesc access = {{1, of(self).number}, 3};
    const int error = told(api.set_access(piece->at, piece->bytes, &access, 1));
    if (error) api.unmap(piece->at, piece->bytes);
    return error;
}

int open(void *, hs_vm *) { return 0; } /* no kernel runs before the unlock */
int set_access(void *, const hs_vm *, int) { return 0; }

int unmap(void *self, const hs_vm *piece) {
    if (const int error = enter(self)) return error;
    return told(api.unmap(piece->at, piece->bytes));
}

int release(void *, const hs_vm *piece) { return told(api.release(piece->handle)); }

int copy_to_host(void *self, const hs_vm *piece, size_t offset, void *host, size_t bytes) {
    if (const int error = enter(self)) return error;
    return told(api.to_host(host, piece->at + offset, bytes));
}

int copy_from_host(void *self, const hs_vm *piece, size_t offset, const void *host, size_t bytes) {
    if (const int error = enter(self)) return error;
    return told(api.from_host(piece->at + offset, host, bytes));
}

int synchronize(void *self) {
    if (const int error = enter(self)) return error;
    return told(api.synchronize());
}

int host_alloc(void *self, size_t bytes, void **host) {
    if (const int error = enter(self)) return error;
    return told(api.host_alloc(host, bytes, 1)); /* 1: portable */
}

int host_free(void *self, void *host, size_t) {
    if (const int error = enter(self)) return error;
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
        {"cuCtxSetCurrent", &api.set_current},
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
        {"cuStreamIsCapturing", &api.is_capturing},
        {"cuStreamSynchronize", &api.stream_synchronize},
    };
    for (const auto &one : wanted) {
        void *found = dlsym(library, one.name);
        if (!found) return "the NVIDIA driver has no virtual memory calls";
        memcpy(one.slot, &found, sizeof found);
    }
    return api.init(0) == 0 ? "" : "cuInit() of the NVIDIA driver failed: there is no device that this process may use";
}

} // namespace

extern "C" hs_vm_driver *hs_cuda_driver(int number, const char **why) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!why_not) why_not = load();
    *why = why_not;
    if (*why_not) return nullptr;
    *why = "there is no such CUDA device";
    if (number < 0 || number >= 64) return nullptr;
    Device &device = devices[number];
    if (device.context) return &device.driver;
    int handle = 0, has = 0;
    if (api.device_get(&handle, number) != 0) return nullptr;
    *why = "the CUDA device has no virtual memory calls";
    if (api.attribute(&has, kHasVirtualMemory, handle) != 0 || !has) return nullptr;
    *why = "the CUDA device cannot be used";
    const AllocationProp wanted = properties(number);
    size_t granularity = 0;
    if (api.granularity(&granularity, &wanted, 0) != 0) return nullptr;
    if (api.retain(&device.context, handle) != 0) {
        device.context = nullptr;
        return nullptr;
    }
    device.number = number;
    device.driver = {&device, granularity, 512, 0, reserve, create, map, open, set_access, unmap, release,
                     copy_to_host, copy_from_host, synchronize, host_alloc, host_free};
    return &device.driver;
}

extern "C" int hs_cuda_is_capturing(void *stream) {
    int status = 0;
    return api.is_capturing && (api.is_capturing(stream, &status) != 0 || status != 0);
}

extern "C" int hs_cuda_stream_synchronize(void *stream) { return told(api.stream_synchronize(stream)); }
