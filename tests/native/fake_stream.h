/* A stream of a fake asynchronous device: a thread that takes its time for each kernel. */
#ifndef FAKE_STREAM_H
#define FAKE_STREAM_H

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

namespace {

int64_t now_ns() { /* CLOCK_MONOTONIC */
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

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
    /* Until what was launched by now has finished. */
    void synchronize() {
        ++waiting;
        for (const int64_t until = launched.load(); finished.load() < until;) usleep(50);
        --waiting;
    }
    std::atomic<bool> stuck{false}; /* behind a collective that waits for a peer */
    std::atomic<int64_t> launched{0}, finished{0}, queued_ns{0}, finished_ns{0}; /* the last of them: when */
    std::atomic<int> waiting{0};

  private:
    void run() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            more_.wait(guard, [&] { return end_ || !kernels_.empty(); });
            if (end_) return;
            const int64_t took_ns = kernels_.front();
            kernels_.pop_front();
            guard.unlock();
            const int64_t until_ns = now_ns() + took_ns;
            while (now_ns() < until_ns || (stuck.load() && !end_)) usleep(20);
            queued_ns -= took_ns;
            finished_ns = now_ns();
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

} // namespace
#endif
