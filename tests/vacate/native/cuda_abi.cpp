/* Compiled where there is a cuda.h: are the types and the numbers that cuda_driver.cpp declares for itself those of cuda.h? */
#define __CUDA_API_VERSION_INTERNAL /* the first version of cuStreamGetCaptureInfo() as well */
#include <cuda.h>
#include <stddef.h>

#include <type_traits>

#include "cuda_driver.cpp"

namespace {

/* The same for the caller: a pointer, or an integer of the same size. */
template <class One, class Other>
constexpr bool kSame = std::is_pointer_v<One> == std::is_pointer_v<Other> && sizeof(One) == sizeof(Other) &&
                       (std::is_pointer_v<One> || std::is_integral_v<One> || std::is_enum_v<One>) &&
                       (std::is_pointer_v<Other> || std::is_integral_v<Other> || std::is_enum_v<Other>);

template <class Ours, class Theirs>
struct Compared;
template <class R, class... Args, class Q, class... Others>
struct Compared<R (*)(Args...), Q (*)(Others...)> {
    static constexpr bool value = [] {
        if constexpr (sizeof...(Args) != sizeof...(Others))
            return false;
        else
            return kSame<R, Q> && (kSame<Args, Others> && ...);
    }();
};
#define SAME(member, function) \
    static_assert(Compared<decltype(Api::member), decltype(&function)>::value, #function)

SAME(init, cuInit);
SAME(device_get, cuDeviceGet);
SAME(attribute, cuDeviceGetAttribute);
SAME(retain, cuDevicePrimaryCtxRetain);
SAME(push, cuCtxPushCurrent_v2);
SAME(pop, cuCtxPopCurrent_v2);
SAME(synchronize, cuCtxSynchronize);
SAME(granularity, cuMemGetAllocationGranularity);
SAME(reserve, cuMemAddressReserve);
SAME(create, cuMemCreate);
SAME(map, cuMemMap);
SAME(set_access, cuMemSetAccess);
SAME(unmap, cuMemUnmap);
SAME(release, cuMemRelease);
SAME(to_host, cuMemcpyDtoH_v2);
SAME(from_host, cuMemcpyHtoD_v2);
SAME(host_alloc, cuMemHostAlloc);
SAME(host_free, cuMemFreeHost);
SAME(capture_info, cuStreamGetCaptureInfo);
SAME(stream_synchronize, cuStreamSynchronize);
SAME(exchange_mode, cuThreadExchangeStreamCaptureMode);
SAME(error_name, cuGetErrorName);

static_assert(sizeof(AllocationProp) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProp, requested_handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProp, win32_meta) == offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(AllocationProp, flags.gpu_direct_rdma) == offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(offsetof(AllocationProp, flags.usage) == offsetof(CUmemAllocationProp, allocFlags.usage));
static_assert(offsetof(Location, id) == offsetof(CUmemLocation, id) && sizeof(Location) == sizeof(CUmemLocation));
static_assert(sizeof(AccessDesc) == sizeof(CUmemAccessDesc) && offsetof(AccessDesc, flags) == offsetof(CUmemAccessDesc, flags));

static_assert(CUDA_SUCCESS == 0 && kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kHasVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kHasDirectRdma == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED && kPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == 1 && CU_MEM_LOCATION_TYPE_DEVICE == 1);
static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == 3 && CU_MEM_ALLOC_GRANULARITY_MINIMUM == 0);
static_assert(CU_STREAM_CAPTURE_STATUS_NONE == 0);

} // namespace
