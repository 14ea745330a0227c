/* A libcuda.so.1 for machines without a device, as far as hydroslurm calls it: virtual memory, copies, streams that are captured,
 * and the checkpoint API. Device memory is memfds, mapped where they are asked for, so that a copy is a copy. Arguments are checked
 * as cuda.h documents them, strictly: what a driver would forgive is an error here. Compiled with -DWITH_CUDA_H where there is a
 * cuda.h, so that the compiler compares each signature.
 *
 *     FAKE_CUDA_BYTES     how much memory the device has; default 1 GiB
 *     FAKE_CUDA_FOLDER    where the states of the checkpoint API lie, a file per process; a file `fail-CALL` there has a number,
 *                         which that call returns once
 *     fake_cuda_fail()    the nth call from now on returns that error, and does nothing
 *     fake_cuda_capture() begin or end a capture on a stream, in the mode that torch uses ("global") */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

#ifdef WITH_CUDA_H
#include <cuda.h>
#undef cuMemcpyDtoH
#undef cuMemcpyHtoD
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuGetProcAddress
#undef cuStreamGetCaptureInfo /* the first version is not in every cuda.h */
#else
typedef int CUresult, CUdevice, CUdevice_attribute, CUmemAllocationGranularity_flags, CUstreamCaptureStatus, CUstreamCaptureMode;
typedef int CUprocessState, CUdriverProcAddressQueryResult;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle, cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct {
    int type, id;
} CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;
typedef struct {
    unsigned timeoutMs, reserved0;
    cuuint64_t reserved1[7];
} CUcheckpointLockArgs;
typedef struct CUcheckpointCheckpointArgs CUcheckpointCheckpointArgs;
typedef struct CUcheckpointRestoreArgs CUcheckpointRestoreArgs;
typedef struct CUcheckpointUnlockArgs CUcheckpointUnlockArgs;
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kGranularity = 2u << 20;
enum Answer { /* of cuda.h */
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kInvalidDevice = 101,
    kInvalidContext = 201,
    kIllegalState = 401,
    kNotFound = 500,
    kCaptureUnsupported = 900,
};

struct Physical {
    int file;
    size_t bytes;
    int mappings;
    bool released;
};
struct Mapping {
    size_t bytes;
    CUmemGenericAllocationHandle handle;
    bool open;
};

std::recursive_mutex mutex;
bool initialized;
std::map<CUdeviceptr, size_t> reserved;
std::map<CUmemGenericAllocationHandle, Physical> memory;
std::map<CUdeviceptr, Mapping> mapped;
std::map<void *, size_t> pinned;
std::set<CUstream> capturing;
bool invalidated; /* the capture */
cuuint64_t capture_id;
size_t used;
int retained; /* the context */
char primary; /* the address of it is the context */
thread_local CUcontext current;
thread_local int mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */
struct {
    std::string call;
    int nth, result;
} fault;

using Lock = std::lock_guard<std::recursive_mutex>;

size_t device_bytes() {
    const char *told = getenv("FAKE_CUDA_BYTES");
    return told ? strtoull(told, nullptr, 10) : size_t{1} << 30;
}

/* What any call asks first; 0: go on. */
int at(const char *call, bool needs_context, bool unsafe_in_capture = false) {
    if (fault.call == call && --fault.nth == 0) return fault.result;
    if (!initialized) return kNotInitialized;
    if (needs_context && current != reinterpret_cast<CUcontext>(&primary)) return kInvalidContext;
    if (unsafe_in_capture && mode != 2 && !capturing.empty()) {
        invalidated = true;
        return kCaptureUnsupported;
    }
    return kSuccess;
}

#define BEGIN(...)                                                              \
    Lock lock(mutex);                                                           \
    if (const int answer = at(__func__, __VA_ARGS__)) return static_cast<CUresult>(answer);
#define ENSURE(condition, otherwise) \
    if (!(condition)) return static_cast<CUresult>(otherwise)
#define DONE return static_cast<CUresult>(kSuccess)

bool whole(size_t number) { return number % kGranularity == 0; }

void perhaps_free(CUmemGenericAllocationHandle handle) {
    Physical &one = memory.at(handle);
    if (one.mappings > 0 || !one.released) return;
    close(one.file);
    used -= one.bytes;
    memory.erase(handle);
}

/* Inside one mapping that may be accessed. */
bool accessible(CUdeviceptr from, size_t bytes) {
    auto past = mapped.upper_bound(from);
    if (past == mapped.begin()) return false;
    auto found = std::prev(past);
    return found->second.open && from + bytes <= found->first + found->second.bytes;
}

bool good(const CUmemAllocationProp *wanted) {
    CUmemAllocationProp plain;
    memset(&plain, 0, sizeof plain);
    memcpy(&plain.type, &wanted->type, sizeof plain.type);
    memcpy(&plain.location.type, &wanted->location.type, sizeof plain.location.type);
    plain.allocFlags.gpuDirectRDMACapable = wanted->allocFlags.gpuDirectRDMACapable;
    return wanted->type == 1 && wanted->location.type == 1 && wanted->location.id == 0 &&
           plain.allocFlags.gpuDirectRDMACapable <= 1 && memcmp(&plain, wanted, sizeof plain) == 0;
}

} // namespace

API void fake_cuda_fail(const char *call, int nth, int result) {
    Lock lock(mutex);
    fault.call = call, fault.nth = nth, fault.result = result;
}
API void fake_cuda_capture(void *stream, int on) {
    Lock lock(mutex);
    invalidated = false;
    capture_id += on != 0;
    if (on)
        capturing.insert(static_cast<CUstream>(stream));
    else
        capturing.erase(static_cast<CUstream>(stream));
}
API int fake_cuda_pending() { return fault.nth; } /* 0 and less: that call has failed */
API int fake_cuda_invalidated() { return invalidated; }
API int fake_cuda_retained() { return retained; }
API size_t fake_cuda_used() { return used; }
API size_t fake_cuda_pinned() {
    size_t bytes = 0;
    for (const auto &one : pinned) bytes += one.second;
    return bytes;
}

/* --- devices and contexts */

API CUresult cuInit(unsigned flags) {
    Lock lock(mutex);
    ENSURE(flags == 0, kInvalidValue);
    initialized = true;
    if (const int answer = at(__func__, false)) {
        initialized = false;
        return static_cast<CUresult>(answer);
    }
    DONE;
}

API CUresult cuGetErrorName(CUresult error, const char **name) {
    static const std::map<int, const char *> known = {{0, "CUDA_SUCCESS"},
                                                      {1, "CUDA_ERROR_INVALID_VALUE"},
                                                      {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                      {3, "CUDA_ERROR_NOT_INITIALIZED"},
                                                      {101, "CUDA_ERROR_INVALID_DEVICE"},
                                                      {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                                      {401, "CUDA_ERROR_ILLEGAL_STATE"},
                                                      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                      {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
    const auto found = known.find(static_cast<int>(error));
    *name = found == known.end() ? nullptr : found->second;
    ENSURE(*name, kInvalidValue);
    DONE;
}

/* How cuda-bindings find the calls. */
API CUresult cuGetProcAddress_v2(const char *name, void **found, int version, cuuint64_t, CUdriverProcAddressQueryResult *result) {
    ENSURE(name && found && version >= 2000, kInvalidValue);
    Dl_info own = {};
    dladdr(reinterpret_cast<void *>(&cuGetErrorName), &own);
    void *library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *found = dlsym(library, name);
    if (!*found) *found = dlsym(library, (std::string(name) + "_v2").c_str());
    dlclose(library);
    if (result) *result = static_cast<CUdriverProcAddressQueryResult>(*found ? 0 : 1);
    ENSURE(*found, kNotFound);
    DONE;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    BEGIN(false)
    ENSURE(device, kInvalidValue);
    ENSURE(ordinal == 0, kInvalidDevice);
    *device = 0;
    DONE;
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    BEGIN(false)
    ENSURE(value, kInvalidValue);
    ENSURE(device == 0, kInvalidDevice);
    ENSURE(attribute == 102 || attribute == 110, kInvalidValue);
    *value = 1;
    DONE;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    BEGIN(false)
    ENSURE(context, kInvalidValue);
    ENSURE(device == 0, kInvalidDevice);
    *context = reinterpret_cast<CUcontext>(&primary);
    retained += 1;
    DONE;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    BEGIN(false)
    ENSURE(context == reinterpret_cast<CUcontext>(&primary), kInvalidContext);
    ENSURE(current == nullptr, kInvalidContext); /* ours do not nest, so that one that is not popped is found */
    current = context;
    DONE;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    BEGIN(true)
    if (context) *context = current;
    current = nullptr;
    DONE;
}

API CUresult cuCtxSynchronize() {
    BEGIN(true, true)
    DONE;
}

/* --- virtual memory */

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted,
                                           CUmemAllocationGranularity_flags option) {
    BEGIN(false)
    ENSURE(bytes && wanted && good(wanted) && option == 0, kInvalidValue);
    *bytes = kGranularity;
    DONE;
}

API CUresult cuMemAddressReserve(CUdeviceptr *found, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    BEGIN(false)
    ENSURE(found && bytes && whole(bytes) && alignment == 0 && hint == 0 && flags == 0, kInvalidValue);
    void *made = mmap(nullptr, bytes + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ENSURE(made != MAP_FAILED, kOutOfMemory);
    *found = (reinterpret_cast<uintptr_t>(made) + kGranularity - 1) / kGranularity * kGranularity;
    reserved[*found] = bytes;
    DONE;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                         unsigned long long flags) {
    BEGIN(false, true)
    ENSURE(handle && bytes && whole(bytes) && wanted && good(wanted) && flags == 0, kInvalidValue);
    ENSURE(used + bytes <= device_bytes(), kOutOfMemory);
    const int file = memfd_create("fake-cuda", MFD_CLOEXEC);
    ENSURE(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0, kOutOfMemory);
    static CUmemGenericAllocationHandle next = 0x1000;
    memory[*handle = next++] = {file, bytes, 0, false};
    used += bytes;
    DONE;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    BEGIN(false, true)
    ENSURE(memory.count(handle) && !memory[handle].released, kInvalidValue);
    memory[handle].released = true;
    perhaps_free(handle);
    DONE;
}

API CUresult cuMemMap(CUdeviceptr to, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    BEGIN(false, true)
    ENSURE(bytes && whole(bytes) && whole(to) && offset == 0 && flags == 0, kInvalidValue);
    ENSURE(memory.count(handle) && !memory[handle].released && memory[handle].bytes == bytes, kInvalidValue);
    auto range = reserved.upper_bound(to);
    ENSURE(range != reserved.begin(), kInvalidValue);
    --range;
    ENSURE(to + bytes <= range->first + range->second, kInvalidValue);
    auto next = mapped.lower_bound(to);
    ENSURE(next == mapped.end() || next->first >= to + bytes, kInvalidValue);
    ENSURE(next == mapped.begin() || std::prev(next)->first + std::prev(next)->second.bytes <= to, kInvalidValue);
    void *place = reinterpret_cast<void *>(to);
    ENSURE(mmap(place, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory[handle].file, 0) == place, kOutOfMemory);
    mapped[to] = {bytes, handle, false};
    memory[handle].mappings += 1;
    DONE;
}

API CUresult cuMemSetAccess(CUdeviceptr from, size_t bytes, const CUmemAccessDesc *wanted, size_t count) {
    BEGIN(false, true)
    ENSURE(wanted && count == 1 && wanted->location.type == 1 && wanted->flags == 3, kInvalidValue);
    ENSURE(wanted->location.id == 0, kInvalidDevice);
    ENSURE(mapped.count(from) && mapped[from].bytes == bytes, kInvalidValue);
    ENSURE(mprotect(reinterpret_cast<void *>(from), bytes, PROT_READ | PROT_WRITE) == 0, kOutOfMemory);
    mapped[from].open = true;
    DONE;
}

API CUresult cuMemUnmap(CUdeviceptr from, size_t bytes) {
    BEGIN(false, true)
    ENSURE(mapped.count(from) && mapped[from].bytes == bytes, kInvalidValue);
    const auto handle = mapped[from].handle;
    mmap(reinterpret_cast<void *>(from), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapped.erase(from);
    memory[handle].mappings -= 1;
    perhaps_free(handle);
    DONE;
}

/* --- copies */

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    BEGIN(true, true)
    ENSURE(to && bytes && accessible(from, bytes), kInvalidValue);
    memcpy(to, reinterpret_cast<void *>(from), bytes);
    DONE;
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    BEGIN(true, true)
    ENSURE(from && bytes && accessible(to, bytes), kInvalidValue);
    memcpy(reinterpret_cast<void *>(to), from, bytes);
    DONE;
}

API CUresult cuMemHostAlloc(void **host, size_t bytes, unsigned flags) {
    BEGIN(true, true)
    ENSURE(host && bytes && flags == 1, kInvalidValue);
    void *made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ENSURE(made != MAP_FAILED, kOutOfMemory);
    pinned[*host = made] = bytes;
    DONE;
}

API CUresult cuMemFreeHost(void *host) {
    BEGIN(true, true)
    ENSURE(pinned.count(host), kInvalidValue);
    munmap(host, pinned[host]);
    pinned.erase(host);
    DONE;
}

/* --- streams */

API CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    BEGIN(false)
    ENSURE(status && id, kInvalidValue);
    const bool is = capturing.count(stream) != 0;
    *status = static_cast<CUstreamCaptureStatus>(is);
    if (is) *id = capture_id;
    DONE;
}

API CUresult cuStreamSynchronize(CUstream stream) {
    BEGIN(false, true)
    if (capturing.count(stream)) {
        invalidated = true;
        return static_cast<CUresult>(kCaptureUnsupported);
    }
    DONE;
}

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *wanted) {
    BEGIN(false)
    ENSURE(wanted && *wanted >= 0 && *wanted <= 2, kInvalidValue);
    const int before = mode;
    mode = static_cast<int>(*wanted);
    *wanted = static_cast<CUstreamCaptureMode>(before);
    DONE;
}

/* --- the checkpoint API, called by another process than the one that it is about */

static std::string file_of(const std::string &name) {
    const char *folder = getenv("FAKE_CUDA_FOLDER");
    return std::string(folder ? folder : "/nonexistent") + "/" + name;
}

static int read_number(const std::string &name, int otherwise) {
    int number = otherwise;
    if (FILE *file = fopen(file_of(name).c_str(), "r")) {
        if (fscanf(file, "%d", &number) != 1) number = otherwise;
        fclose(file);
    }
    return number;
}

static CUresult step(const char *call, int pid, int before, int after) {
    Lock lock(mutex);
    ENSURE(initialized, kNotInitialized);
    ENSURE(pid > 0, kInvalidValue);
    const std::string fails = std::string("fail-") + call;
    if (const int answer = read_number(fails, 0)) {
        unlink(file_of(fails).c_str());
        return static_cast<CUresult>(answer);
    }
    ENSURE(read_number(std::to_string(pid), 0) == before, kIllegalState);
    FILE *file = fopen(file_of(std::to_string(pid)).c_str(), "w");
    ENSURE(file && fprintf(file, "%d\n", after) > 0 && fclose(file) == 0, kInvalidValue);
    DONE;
}

template <class T>
static bool zeros(const T *arguments, size_t from = 0) {
    const auto *bytes = reinterpret_cast<const unsigned char *>(arguments);
    for (size_t i = from; arguments && i < 64; ++i)
        if (bytes[i]) return false;
    return true;
}

API CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) {
    Lock lock(mutex);
    ENSURE(initialized, kNotInitialized);
    ENSURE(pid > 0 && state, kInvalidValue);
    *state = static_cast<CUprocessState>(read_number(std::to_string(pid), 0));
    DONE;
}

API CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *arguments) {
    static_assert(sizeof(CUcheckpointLockArgs) == 64, "");
    /* 0 would be without a limit: hydroslurm never asks for that */
    ENSURE(arguments && arguments->timeoutMs > 0 && zeros(arguments, sizeof(unsigned)), kInvalidValue);
    return step("lock", pid, 0, 1);
}
API CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *arguments) {
    ENSURE(zeros(arguments), kInvalidValue);
    return step("checkpoint", pid, 1, 2);
}
API CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments) {
    ENSURE(zeros(arguments), kInvalidValue);
    return step("restore", pid, 2, 1);
}
API CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *arguments) {
    ENSURE(zeros(arguments), kInvalidValue);
    return step("unlock", pid, 1, 0);
}
