/* The only file that touches torch: callbacks, armed and disarmed, and two queries.
 *
 * addGlobalCallback() and removeCallback() may be called while other threads run operators: since torch 1.12 the list is
 * replaced under a mutex, and each thread copies it when it sees a new version number. A callback may still be running in
 * another thread when removeCallback() returns, so this library is never unloaded. */
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <errno.h>
#include <torch/csrc/autograd/function.h>

#include <exception>
#include <memory>
#include <new>

#include "internal.h"

namespace {

bool is_node(const at::RecordFunction &function) { return function.scope() == at::RecordScope::BACKWARD_FUNCTION; }

std::unique_ptr<at::ObserverContext> on_hold(const at::RecordFunction &function) {
    hs::operator_reached(function.name(), is_node(function));
    return nullptr;
}

std::unique_ptr<at::ObserverContext> on_trace(const at::RecordFunction &function) {
    hs::operator_traced(function.name(), is_node(function));
    return nullptr;
}

std::unique_ptr<at::ObserverContext> on_launch(const at::RecordFunction &) {
    hs::operator_launches();
    return nullptr;
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction &function) {
    hs::operator_begun(function.name());
    return nullptr;
}

void on_end(const at::RecordFunction &, at::ObserverContext *) { hs::operator_ended(); }

struct {
    at::RecordFunctionCallback::StartCallback start;
    at::RecordFunctionCallback::EndCallback end = nullptr;
    at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
} callbacks[hs::kCallbacks] = {{on_hold}, {on_trace}, {on_launch}, {on_begin, on_end}}; /* by enum Callback */

int add(hs::Callback which) noexcept {
    auto &one = callbacks[which];
    try {
        one.handle = at::addGlobalCallback(
            at::RecordFunctionCallback(one.start, one.end).scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
        return 0;
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    } catch (...) {
        return -EIO;
    }
}

void remove(hs::Callback which) noexcept {
    at::CallbackHandle &handle = callbacks[which].handle;
    try {
        if (handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle);
    } catch (...) {
        /* already gone: clearGlobalCallbacks() was called */
    }
    handle = at::INVALID_CALLBACK_HANDLE;
}

/* --- CUDA graph capture ------------------------------------------------------------------------------------- */

/* The three values used here from cuda.h, which a machine that compiles this may lack. */
constexpr int kCudaSuccess = 0;
constexpr int kCaptureNone = 0;
constexpr int kCaptureImplicit = 906; /* the legacy stream, while another stream of the context captures */

struct Driver {
    int (*context_current)(void **) = nullptr;
    int (*stream_is_capturing)(void *, int *) = nullptr;
    void *(*torch_stream)(const c10::Stream *) = nullptr; /* CUDAStream::stream(), a class of one member, a c10::Stream */
};

void *symbol_of(const char *library, const char *name) noexcept {
    void *handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    return handle != nullptr ? dlsym(handle, name) : nullptr;
}

template <typename Function> void find(Function &function, const char *library, const char *name) noexcept {
    function = reinterpret_cast<Function>(symbol_of(library, name));
}

/* CUDA may come into the process at any time: look again at each closing, but do not load a missing library. */
std::atomic<const Driver *> driver{nullptr};

void find_driver() noexcept {
    if (driver.load() != nullptr || !c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return;
    static Driver found;
    find(found.context_current, "libcuda.so.1", "cuCtxGetCurrent");
    find(found.stream_is_capturing, "libcuda.so.1", "cuStreamIsCapturing");
    find(found.torch_stream, "libc10_cuda.so", "_ZNK4c104cuda10CUDAStream6streamEv");
    if (found.context_current != nullptr && found.stream_is_capturing != nullptr) driver.store(&found);
}

/* Newer torch returns the native stream itself, older ones through libc10_cuda. */
template <typename Guard>
auto native_stream(const Guard &guard, const c10::Stream &stream, const Driver &, int)
    -> decltype(guard.getStreamNativeHandle(stream)) {
    return guard.getStreamNativeHandle(stream);
}
template <typename Guard>
void *native_stream(const Guard &, const c10::Stream &stream, const Driver &cuda, long) {
    return cuda.torch_stream != nullptr ? cuda.torch_stream(&stream) : nullptr;
}

/* A thread without a current context captures nothing, and asking torch for its stream would initialise CUDA. */
bool capturing() {
    const Driver *cuda = driver.load();
    if (cuda == nullptr) return false;
    void *context = nullptr;
    if (cuda->context_current(&context) != kCudaSuccess || context == nullptr) return false;
    try {
        const c10::impl::DeviceGuardImplInterface &guard = *c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
        const c10::Stream stream = guard.getStream(guard.getDevice());
        int status = kCaptureNone;
        const int error = cuda->stream_is_capturing(native_stream(guard, stream, *cuda, 0), &status);
        return error == kCaptureImplicit || (error == kCudaSuccess && status != kCaptureNone);
    } catch (...) {
        return false;
    }
}

/* --- the device that launches are bounded for ------------------------------------------------------------------ */

std::atomic<const c10::impl::DeviceGuardImplInterface *> bounded{nullptr};

c10::Stream stream_of(const hs::DeviceStream &stream) {
    const c10::Device device(bounded.load()->type(), static_cast<c10::DeviceIndex>(stream.device));
    return c10::Stream(c10::Stream::UNSAFE, device, stream.stream);
}

bool use_device(int type) {
    if (type < 0 || type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES) return false;
    const auto wanted = static_cast<c10::DeviceType>(type);
    if (!c10::impl::hasDeviceGuardImpl(wanted)) return false;
    find_driver();
    bounded.store(c10::impl::getDeviceGuardImpl(wanted));
    return true;
}

bool stream_of_thread(hs::DeviceStream *out) {
    const auto *guard = bounded.load();
    if (guard->type() == c10::DeviceType::CUDA) { /* as in capturing() */
        const Driver *cuda = driver.load();
        void *context = nullptr;
        if (cuda == nullptr || cuda->context_current(&context) != kCudaSuccess || context == nullptr) return false;
    }
    try {
        const c10::Stream stream = guard->getStream(guard->getDevice());
        *out = {stream.device_index(), stream.id()};
        return true;
    } catch (...) {
        return false;
    }
}

bool record_event(const hs::DeviceStream &stream, void **event) {
    try {
        bounded.load()->record(event, stream_of(stream), static_cast<c10::DeviceIndex>(stream.device), c10::EventFlag::PYTORCH_DEFAULT);
        return true;
    } catch (...) {
        return false;
    }
}

bool event_is_finished(const hs::DeviceStream &, void *event) {
    try {
        return bounded.load()->queryEvent(event);
    } catch (...) {
        return true; /* the training's next own call will report its error */
    }
}

/* --- the seam ----------------------------------------------------------------------------------------------- */

int on(hs::Callback which) {
    if (which == hs::HOLD) find_driver();
    return add(which);
}

bool any() { return at::hasGlobalCallbacks(); }

bool in_backward() {
    const auto node = torch::autograd::get_current_node();
    return node != nullptr;
}

} // namespace

const hs::Arming &hs::arming() {
    static constexpr Arming torch = {on, remove, any, in_backward, capturing};
    return torch;
}

const hs::Device &hs::device() {
    static constexpr Device torch = {use_device, stream_of_thread, record_event, event_is_finished};
    return torch;
}
