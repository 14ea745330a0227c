/* The queue of events: the watcher (and hs_gate_check_handlers) writes, the controller reads. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

namespace hs {

pthread_mutex_t events_mutex = PTHREAD_MUTEX_INITIALIZER;

namespace {

constexpr uint32_t kEvents = 2048;

struct Queue {
    hs_event events[kEvents];
    uint32_t first = 0;
    uint32_t n = 0;
    int64_t dropped = 0;
    int fd = -1;
    bool unannounced = false;
};
Queue queue;

} // namespace

hs_event event_of(hs_event_kind kind) noexcept {
    hs_event event = {};
    event.kind = kind;
    event.mono_ns = mono_ns();
    event.epoch_ns = epoch_ns();
    event.causes = gate.causes.load();
    return event;
}

void event_text(hs_event &event, const char *text) noexcept {
    strncpy(event.text, text, HS_TEXT_BYTES - 1);
    event.text[HS_TEXT_BYTES - 1] = '\0';
}

void event_push(const hs_event &event) noexcept {
    const Locked locked(events_mutex);
    if (queue.n == kEvents) {
        ++queue.dropped;
    } else {
        queue.events[(queue.first + queue.n) % kEvents] = event;
        ++queue.n;
    }
    queue.unannounced = true;
}

void events_announce() noexcept {
    const Locked locked(events_mutex);
    if (queue.unannounced && queue.fd >= 0) {
        const uint64_t one = 1;
        /* EAGAIN: the counter is full, so the reader is awake already. Other errors have no remedy. */
        [[maybe_unused]] const ssize_t written = write(queue.fd, &one, sizeof one);
    }
    queue.unannounced = false;
}

void events_use_fd(int fd) noexcept {
    const Locked locked(events_mutex);
    queue.fd = fd;
}

void events_after_fork() noexcept {
    queue.first = queue.n = 0;
    queue.dropped = 0;
    queue.fd = -1; /* the parent's */
    queue.unannounced = false;
}

} // namespace hs

using namespace hs;

int hs_gate_read(hs_event *out, int n) {
    if (n < 0 || (n > 0 && out == nullptr)) return -EINVAL;
    const Locked locked(events_mutex);
    int copied = 0;
    for (; copied < n && queue.n > 0; ++copied) {
        out[copied] = queue.events[queue.first];
        queue.first = (queue.first + 1) % kEvents;
        --queue.n;
    }
    if (copied < n && queue.dropped > 0) {
        out[copied] = event_of(HS_EVENT_EVENTS_DROPPED);
        out[copied++].count = queue.dropped;
        queue.dropped = 0;
    }
    if (queue.n == 0) queue.unannounced = false; /* read before the announcement: do not wake the reader again */
    return copied;
}
