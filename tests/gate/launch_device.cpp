/* A device of torch's (PrivateUse1) that has streams and events and nothing else: an event is finished when it was asked for a few
 * times. What the gate asks of torch for a bound on launches, it asks of this. */
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

constexpr int kAskedFor = 3;
std::atomic<long> recorded{0}, asked{0};
std::atomic<bool> broken{false};
thread_local c10::StreamId current = 7;

struct LaunchDevice final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
    c10::DeviceType type() const override { return static_type; }
    c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
    c10::Device getDevice() const override { return {static_type, 0}; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, current); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        TORCH_CHECK(!broken.load() && stream.id() == current, "not recorded");
        if (*event == nullptr) *event = new int;
        *static_cast<int *>(*event) = 0;
        ++recorded;
    }
    bool queryEvent(void *event) const override {
        ++asked;
        return ++*static_cast<int *>(event) > kAskedFor;
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, LaunchDevice);

} // namespace

extern "C" __attribute__((visibility("default"))) long device_recorded() { return recorded.load(); }
extern "C" __attribute__((visibility("default"))) long device_asked() { return asked.load(); }
extern "C" __attribute__((visibility("default"))) void device_break(int on) { broken.store(on != 0); }
