/* Bounds how much work of a device is launched beyond what it has finished, so that a pause is soon followed by an idle device.
 *
 * A launch takes microseconds and its kernel may take milliseconds, so that a training thread is soon a thousand kernels ahead
 * (where CUDA's own queue is full). None of them can be taken back. Here the launches of each stream are divided into slices; an
 * event is recorded behind each, and a thread that comes to an operator waits until few enough of them are unfinished.
 *
 * How long kernels take is only known when they are done, so the newest slice that is finished tells. Slices are made as long as
 * an eighth of the bound, but of at most kMostLaunches: kernels that suddenly take longer then exceed the bound by what is in
 * kMostSlices of them, once. A launch that takes longer than the bound goes alone: it is the "one kernel" beyond it.
 *
 * Waiting polls. To block in the driver would be to sit there when the gate closes, behind a collective that a rank which is
 * parked already will never join; a thread that polls sees the gate and goes to be held. */
#include <errno.h>
#include <unistd.h>

#include <algorithm>

#include "internal.h"

namespace hs {
namespace {

constexpr int kMostStreams = 64;
constexpr int kMostSlices = 16;
constexpr int kMostLaunches = 32; /* an event costs about 1.5 us: 50 ns a launch */
constexpr int kSlicesInBound = 8;
constexpr int64_t kShortestPoll_ns = 20'000;
constexpr int64_t kLongestPoll_ns = 200'000;

struct Slice {
    void *event = nullptr; /* reused; never given back, for there are few */
    int launches = 0;
    int64_t begun_ns = 0; /* its first launch */
    int64_t ended_ns = 0; /* its event */
};

/* One of the device's queues. All of it with the lock. */
struct Queue {
    DeviceStream stream;
    Slice slices[kMostSlices]; /* a ring of those that are unfinished, as far as we know */
    int first = 0;
    int unfinished = 0;
    int behind = 0;   /* launches in these */
    int launches = 0; /* since the last event */
    int launches_per_slice = 1;
    int64_t begun_ns = 0;    /* the first of them */
    int64_t looked_ns = 0;   /* when the first of `slices` was last seen unfinished */
    int64_t before_ns = 0;   /* the same of the one before it, so that the first began no earlier */
    int64_t finished_ns = 0; /* when that one was seen finished, so that the first began no later, if it was there by then */
    int64_t launch_ns = 0;   /* what a launch takes the device at most, on average; 0: not known yet */

    void clear() noexcept {
        first = unfinished = behind = launches = 0;
        launches_per_slice = 1;
        looked_ns = before_ns = finished_ns = launch_ns = 0;
    }
    Slice &slice(int n) noexcept { return slices[(first + n) % kMostSlices]; }
};

struct Ahead {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    std::atomic<int64_t> bound_ns{0};
    std::atomic<bool> stale_callback{false}; /* a child was forked */
    Queue queues[kMostStreams];
    int n = 0;
    hs_launch_ahead seen = {};
};
Ahead ahead;

Queue *queue_of(const DeviceStream &stream) noexcept {
    for (int i = 0; i < ahead.n; ++i)
        if (ahead.queues[i].stream == stream) return &ahead.queues[i];
    if (ahead.n == kMostStreams) return nullptr;
    Queue &queue = ahead.queues[ahead.n++];
    queue.stream = stream;
    return &queue;
}

bool must_wait(const Queue &queue, int64_t bound_ns) noexcept {
    if (queue.unfinished == 0) return false;
    if (queue.unfinished == kMostSlices || queue.launch_ns == 0) return true;
    const int next = queue.launches_per_slice > 1 ? queue.launches_per_slice : 0; /* a single one may go beyond the bound */
    return (queue.behind + next) * queue.launch_ns > bound_ns;
}

void guess(Queue &queue, int64_t launch_ns, int64_t bound_ns) noexcept {
    queue.launch_ns = std::max<int64_t>(launch_ns, 1);
    const int most = std::min(queue.launches_per_slice * 2, kMostLaunches);
    queue.launches_per_slice = static_cast<int>(std::clamp<int64_t>(bound_ns / kSlicesInBound / queue.launch_ns, 1, most));
}

/* Slices were found finished. When they were is not known, only when they were not yet: what comes of that is what their launches
 * took at most. It is close for a thread that waits; one that has not looked for long takes them for longer than they are, and
 * knows better after the next wait. */
void learn(Queue &queue, int n, int64_t now_ns, int64_t bound_ns) noexcept {
    const int64_t since_ns = std::max(queue.before_ns, queue.slice(0).begun_ns);
    int launches = 0;
    for (int i = 0; i < n; ++i) launches += queue.slice(i).launches;
    queue.first = (queue.first + n) % kMostSlices;
    queue.unfinished -= n;
    queue.behind -= launches;
    queue.before_ns = queue.looked_ns;
    queue.finished_ns = now_ns;
    const int64_t took_ns = (now_ns - since_ns) / launches;
    /* up at once: too short a guess exceeds the bound, as where the next slice has a dearer mix of kernels (by 0.2 ms of 20, and one
     * kernel). Down by half: by a quarter or an eighth no more than 17 or 13 ms of 20 were queued, and at 1 ms 5 to 10 % were lost */
    guess(queue, std::max(took_ns, (queue.launch_ns + took_ns) / 2), bound_ns);
}

void look(Queue &queue, int64_t bound_ns) noexcept {
    const int64_t now_ns = mono_ns(); /* before the device is asked */
    int n = 0;
    while (n < queue.unfinished && device().is_finished(queue.stream, queue.slice(n).event)) ++n;
    if (n > 0) {
        learn(queue, n, mono_ns(), bound_ns);
    } else if (queue.unfinished > 0) { /* it takes as long as this already */
        const int64_t so_far_ns = (now_ns - std::max(queue.slice(0).ended_ns, queue.finished_ns)) / queue.slice(0).launches;
        if (queue.launch_ns > 0 && so_far_ns > queue.launch_ns) guess(queue, so_far_ns, bound_ns);
    }
    queue.looked_ns = now_ns;
}

/* An event behind all that was launched so far. False: the device takes none. */
bool end_slice(Queue &queue) noexcept {
    Slice &slice = queue.slice(queue.unfinished);
    if (!device().record(queue.stream, &slice.event)) return false;
    slice.launches = queue.launches;
    slice.begun_ns = queue.begun_ns;
    slice.ended_ns = mono_ns();
    queue.launches = 0;
    queue.behind += slice.launches;
    ++queue.unfinished;
    ++ahead.seen.events;
    return true;
}

/* With the lock, which it gives up while it sleeps. */
void wait_for_device(Queue &queue, int64_t bound_ns) noexcept {
    if (!must_wait(queue, bound_ns)) return;
    const int64_t poll_ns = std::clamp(bound_ns / (4 * kSlicesInBound), kShortestPoll_ns, kLongestPoll_ns);
    const int64_t began_ns = mono_ns();
    void *gil = gil_give_up();
    /* a gate that is closed and not armed yet holds nobody: launches would run away until it is */
    while (must_wait(queue, bound_ns) && !(gate.closed.load() != 0 && gate.armed.load()) && ahead.bound_ns.load() != 0) {
        pthread_mutex_unlock(&ahead.lock);
        futex_wait(gate.closed, 0, poll_ns);
        pthread_mutex_lock(&ahead.lock);
        look(queue, bound_ns);
    }
    ++ahead.seen.waits;
    ahead.seen.waited_ns += mono_ns() - began_ns;
    if (gil == nullptr) return;
    pthread_mutex_unlock(&ahead.lock); /* who has the GIL may wait for it */
    gil_take_back(gil);
    pthread_mutex_lock(&ahead.lock);
}

} // namespace

/* In the thread that is about to launch; what it launches now is not behind any event yet. */
void operator_launches() noexcept {
    const int64_t bound_ns = ahead.bound_ns.load(std::memory_order_relaxed);
    if (bound_ns == 0) {
        if (ahead.stale_callback.load(std::memory_order_relaxed) && ahead.stale_callback.exchange(false)) arming().launches_off();
        return;
    }
    DeviceStream stream;
    if (!thread_trains() || !device().stream_of_thread(&stream)) return;
    pthread_mutex_lock(&ahead.lock);
    if (Queue *queue = queue_of(stream)) {
        const bool ends = queue->launches >= queue->launches_per_slice;
        if (ends && arming().capturing()) {
            queue->clear(); /* an event of ours would become a part of the graph */
        } else if (ends) {
            look(*queue, bound_ns);
            if (queue->unfinished < kMostSlices && end_slice(*queue)) wait_for_device(*queue, bound_ns);
        }
        if (queue->launches == 0) queue->begun_ns = mono_ns();
        ++queue->launches;
    }
    pthread_mutex_unlock(&ahead.lock);
}

void ahead_lock() noexcept { pthread_mutex_lock(&ahead.lock); }
void ahead_unlock() noexcept { pthread_mutex_unlock(&ahead.lock); }

/* The child has no device, and the parent's events are not its own. */
void ahead_after_fork() noexcept {
    pthread_mutex_init(&ahead.lock, nullptr);
    ahead.stale_callback.store(ahead.bound_ns.exchange(0) != 0);
    for (Queue &queue : ahead.queues) queue = Queue{};
    ahead.n = 0;
}

} // namespace hs

using namespace hs;

int hs_gate_bound_launches(int device_type, int64_t bound_ns) {
    if (bound_ns < 0) return -EINVAL;
    if (const int error = forks_watch(); error < 0) return error;
    if (gate.owner.load() != getpid()) hold_find_python(); /* as hs_gate_start() does */
    ahead_lock();
    int result = 0;
    const bool was_on = ahead.bound_ns.load() != 0 || ahead.stale_callback.exchange(false);
    if (was_on) arming().launches_off();
    ahead.bound_ns.store(0);
    if (bound_ns > 0) {
        for (Queue &queue : ahead.queues) queue.clear(); /* its events stay, and are recorded anew */
        ahead.seen = {};
        if (!device().use(device_type)) result = -ENODEV;
        if (result == 0) result = arming().launches_on();
        if (result == 0) ahead.bound_ns.store(bound_ns);
    }
    ahead_unlock();
    return result;
}

int hs_gate_launches(hs_launch_ahead *out) {
    if (out == nullptr) return -EINVAL;
    ahead_lock();
    *out = ahead.seen;
    out->bound_ns = ahead.bound_ns.load();
    ahead_unlock();
    return 0;
}
