/* A fake asynchronous device: its streams are threads that take their time for each kernel. For one source of a program. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "harness.h"

namespace {

constexpr int64_t kUs = 1000, kMillisecond = 1'000'000;

struct Event {
    std::atomic<int64_t> place{0}; /* how many of the stream's items are before it */
};

/* A queue of kernels. What is not finished is counted in the kernels' own time, whatever this machine makes of it. */
class Stream {
  public:
    Stream() : thread_([this] { run(); }) {}
    ~Stream() {
        {
            std::lock_guard<std::mutex> guard(lock_);
            end_ = true;
        }
        more_.notify_one();
        thread_.join();
    }
    void launch(int64_t took_ns) {
        std::lock_guard<std::mutex> guard(lock_);
        kernels_.push_back(took_ns);
        ++launched;
        queued_ns += took_ns;
        more_.notify_one();
    }
    std::atomic<bool> stuck{false}; /* behind a collective that waits for a peer */
    std::atomic<int64_t> launched{0}, finished{0}, queued_ns{0};

  private:
    void run() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            more_.wait(guard, [&] { return end_ || !kernels_.empty(); });
            if (end_) return;
            const int64_t took_ns = kernels_.front();
            kernels_.pop_front();
            guard.unlock();
            const int64_t until_ns = hs::mono_ns() + took_ns;
            while (hs::mono_ns() < until_ns || (stuck.load() && !end_)) usleep(20);
            queued_ns -= took_ns;
            ++finished;
            guard.lock();
        }
    }
    std::mutex lock_;
    std::condition_variable more_;
    std::deque<int64_t> kernels_;
    std::atomic<bool> end_{false};
    std::thread thread_;
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
