/* A fake asynchronous device: its streams are threads that take their time for each kernel. For one source of a program. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <algorithm>
#include <memory>

#include "fake_stream.h"
#include "harness.h"

namespace {

constexpr int64_t kUs = 1000, kMillisecond = 1'000'000;

struct Event {
    std::atomic<int64_t> place{0}; /* how many of the stream's items are before it */
};

struct FakeDevice {
    std::unique_ptr<Stream> streams[4];
    std::vector<std::unique_ptr<Event>> events;
    std::atomic<int> in_use{-1};
    Stream &stream(int64_t n) { return *streams[n]; }
};
FakeDevice *there = nullptr;
thread_local int64_t current = 0;

bool use(int type) {
    there->in_use.store(type);
    return type == 20;
}
bool stream_of_thread(hs::DeviceStream *out) {
    *out = {0, current};
    return true;
}
bool record(const hs::DeviceStream &stream, void **event) {
    if (*event == nullptr) {
        there->events.push_back(std::make_unique<Event>());
        *event = there->events.back().get();
    }
    static_cast<Event *>(*event)->place.store(there->stream(stream.stream).launched.load());
    return true;
}
bool is_finished(const hs::DeviceStream &stream, void *event) {
    return there->stream(stream.stream).finished.load() >= static_cast<Event *>(event)->place.load();
}

/* An operator of one kernel; returns how much was queued before it in the kernels' own time. */
int64_t operate(int64_t took_ns) {
    fake_operator();
    Stream &stream = there->stream(current);
    const int64_t ahead_ns = stream.queued_ns.load();
    stream.launch(took_ns);
    return ahead_ns;
}

int64_t operate(int n, int64_t took_ns) {
    int64_t most_ns = 0;
    for (int i = 0; i < n; ++i) most_ns = std::max(most_ns, operate(took_ns));
    return most_ns;
}

struct WithDevice {
    WithDevice() {
        for (auto &stream : device.streams) stream = std::make_unique<Stream>();
        there = &device;
    }
    ~WithDevice() { CHECK_EQ(hs_gate_bound_launches(20, 0), 0); }
    FakeDevice device;
};

} // namespace

const hs::Device &hs::device() {
    static constexpr Device fake_device = {use, stream_of_thread, record, is_finished};
    return fake_device;
}
#endif
