/* Bounds the device work launched beyond what is finished, so that the device is idle soon after a pause.
 *
 * A launch takes microseconds, its kernel may take milliseconds: a training thread is soon a thousand kernels ahead (where
 * CUDA's own queue is full), and none can be taken back. So each stream's launches are divided into slices, each followed by a
 * recorded event, and a thread at an operator waits until few enough slices are unfinished.
 *
 * A kernel's time is known only when it is done; the newest finished slice gives the estimate. A slice lasts an eighth of the
 * bound, but has at most kMostLaunches: if kernels suddenly take longer, the contents of kMostSlices exceed the bound once. A
 * launch that takes longer than the bound goes alone: it is the "one kernel" beyond it.
 *
 * Waiting polls. Blocked in the driver, a thread would be stuck when the gate closes, behind a collective that a parked rank
 * will never join; a polling thread sees the gate and goes to be held. */
#include <errno.h>
#include <unistd.h>

#include <algorithm>

#include "internal.h"

namespace hs {

pthread_mutex_t ahead_mutex = PTHREAD_MUTEX_INITIALIZER;

namespace {

constexpr int kMostStreams = 64;
constexpr int kMostSlices = 16;
constexpr int kMostLaunches = 32; /* an event costs about 1.5 us: 50 ns a launch */
constexpr int kSlicesInBound = 8;
constexpr int64_t kShortestPoll_ns = 20'000;
constexpr int64_t kLongestPoll_ns = 200'000;

struct Slice {
    void *event = nullptr; /* reused, never freed: there are few */
    int launches = 0;
    int64_t begun_ns = 0; /* its first launch */
    int64_t ended_ns = 0; /* its event */
};

/* One of the device's queues. All of it needs the lock. */
struct Queue {
    DeviceStream stream;
    Slice slices[kMostSlices]; /* a ring of the unfinished ones, as far as known */
    int first = 0;
    int unfinished = 0;
    int behind = 0;   /* launches in these */
    int launches = 0; /* since the last event */
    int launches_per_slice = 1;
    int64_t begun_ns = 0;    /* the first of these */
    int64_t looked_ns = 0;   /* when `slices[first]` was last seen unfinished */
    int64_t before_ns = 0;   /* the same for its predecessor: it began no earlier */
    int64_t finished_ns = 0; /* when its predecessor was seen finished: it began no later, if launched by then */
    int64_t launch_ns = 0;   /* upper bound of a launch's mean device time; 0: unknown */

    void clear() noexcept {
        first = unfinished = behind = launches = 0;
        launches_per_slice = 1;
        looked_ns = before_ns = finished_ns = launch_ns = 0;
    }
    Slice &slice(int n) noexcept { return slices[(first + n) % kMostSlices]; }
};

struct Ahead {
    std::atomic<int64_t> bound_ns{0};
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
    const int next = queue.launches_per_slice > 1 ? queue.launches_per_slice : 0; /* a single one may exceed the bound */
    return (queue.behind + next) * queue.launch_ns > bound_ns;
}

void guess(Queue &queue, int64_t launch_ns, int64_t bound_ns) noexcept {
    queue.launch_ns = std::max<int64_t>(launch_ns, 1);
    const int most = std::min(queue.launches_per_slice * 2, kMostLaunches);
    queue.launches_per_slice = static_cast<int>(std::clamp<int64_t>(bound_ns / kSlicesInBound / queue.launch_ns, 1, most));
}

/* Update the estimate from finished slices. When they finished is unknown, only when they had not: so it is an upper bound of
 * their launches' time. It is close in a thread that waits; after a long time without a check it is too high until the next
 * wait. */
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
    /* up at once: a low estimate exceeds the bound, if the next slice has costlier kernels (by 0.2 ms of 20, and one kernel).
     * Down by half: by a quarter or an eighth no more than 17 or 13 ms of 20 were queued, and at 1 ms 5 to 10 % were lost */
    guess(queue, std::max(took_ns, (queue.launch_ns + took_ns) / 2), bound_ns);
}

void look(Queue &queue, int64_t bound_ns) noexcept {
    const int64_t now_ns = mono_ns(); /* before the device is queried */
    int n = 0;
    while (n < queue.unfinished && device().is_finished(queue.stream, queue.slice(n).event)) ++n;
    if (n > 0) {
        learn(queue, n, mono_ns(), bound_ns);
    } else if (queue.unfinished > 0) { /* it has already taken this long */
        const int64_t so_far_ns = (now_ns - std::max(queue.slice(0).ended_ns, queue.finished_ns)) / queue.slice(0).launches;
        if (queue.launch_ns > 0 && so_far_ns > queue.launch_ns) guess(queue, so_far_ns, bound_ns);
    }
    queue.looked_ns = now_ns;
}

/* Record an event after all launches so far. False: the device accepts none. */
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

/* Call with the lock, which is released while it sleeps. */
void wait_for_device(Queue &queue, int64_t bound_ns) noexcept {
    if (!must_wait(queue, bound_ns)) return;
    const int64_t poll_ns = std::clamp(bound_ns / (4 * kSlicesInBound), kShortestPoll_ns, kLongestPoll_ns);
    const int64_t began_ns = mono_ns();
    void *gil = gil_give_up();
    /* a gate that is closed but not armed holds no thread: without waiting, launches would run away until it is armed */
    while (must_wait(queue, bound_ns) && !(gate.closed.load() != 0 && gate.armed.load()) && ahead.bound_ns.load() != 0) {
        pthread_mutex_unlock(&ahead_mutex);
        futex_wait(gate.closed, 0, poll_ns);
        pthread_mutex_lock(&ahead_mutex);
        look(queue, bound_ns);
    }
    ++ahead.seen.waits;
    ahead.seen.waited_ns += mono_ns() - began_ns;
    if (gil == nullptr) return;
    pthread_mutex_unlock(&ahead_mutex); /* the GIL's holder may wait for it */
    gil_take_back(gil);
    pthread_mutex_lock(&ahead_mutex);
}

} // namespace

/* Called in the thread about to launch; its new launch is not followed by any event yet. */
void operator_launches() noexcept {
    const int64_t bound_ns = ahead.bound_ns.load(std::memory_order_relaxed);
    if (bound_ns == 0) {
        callback_drop_inherited(LAUNCHES);
        return;
    }
    DeviceStream stream;
    if (!thread_trains() || !device().stream_of_thread(&stream)) return;
    const Locked locked(ahead_mutex);
    Queue *queue = queue_of(stream);
    if (queue == nullptr) return;
    const bool ends = queue->launches >= queue->launches_per_slice;
    if (ends && arming().capturing()) {
        queue->clear(); /* our event would become part of the graph */
    } else if (ends) {
        look(*queue, bound_ns);
        if (queue->unfinished < kMostSlices && end_slice(*queue)) wait_for_device(*queue, bound_ns);
    }
    if (queue->launches == 0) queue->begun_ns = mono_ns();
    ++queue->launches;
}

/* Reset in a child, which has no device; the parent's events are not its own. */
void ahead_after_fork() noexcept {
    ahead.bound_ns.store(0);
    for (Queue &queue : ahead.queues) queue = Queue{};
    ahead.n = 0;
}

} // namespace hs

using namespace hs;

int hs_gate_bound_launches(int device_type, int64_t bound_ns) {
    if (bound_ns < 0) return -EINVAL;
    if (const int error = forks_watch(); error < 0) return error;
    if (gate.owner.load() != getpid()) hold_find_python(); /* as hs_gate_start() does */
    const Locked locked(ahead_mutex);
    callback_off(LAUNCHES);
    ahead.bound_ns.store(0);
    if (bound_ns == 0) return 0;
    for (Queue &queue : ahead.queues) queue.clear(); /* its events stay, and are reused */
    ahead.seen = {};
    if (!device().use(device_type)) return -ENODEV;
    const int result = callback_on(LAUNCHES);
    if (result == 0) ahead.bound_ns.store(bound_ns);
    return result;
}

int hs_gate_launches(hs_launch_ahead *out) {
    if (out == nullptr) return -EINVAL;
    const Locked locked(ahead_mutex);
    *out = ahead.seen;
    out->bound_ns = ahead.bound_ns.load();
    return 0;
}
