/* Counting the operators of the process; nobody is held. */
#include <errno.h>

#include "internal.h"

namespace hs {
namespace {

struct Count {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    std::atomic<bool> on{false};
    std::atomic<bool> stale_callback{false}; /* a child was forked while counting */
    std::atomic<int64_t> operators{0};
};
Count count;

} // namespace

void operator_counted() noexcept {
    if (count.on.load())
        count.operators.fetch_add(1);
    else if (count.stale_callback.load(std::memory_order_relaxed) && count.stale_callback.exchange(false))
        arming().count_off();
}

void count_lock() noexcept { pthread_mutex_lock(&count.lock); }
void count_unlock() noexcept { pthread_mutex_unlock(&count.lock); }

void count_after_fork() noexcept {
    pthread_mutex_init(&count.lock, nullptr);
    count.stale_callback.store(count.on.exchange(false));
}

} // namespace hs

using namespace hs;

int hs_gate_count_start(void) {
    count_lock();
    int result = -EBUSY;
    if (!count.on.load()) {
        count.operators.store(0);
        if (count.stale_callback.exchange(false)) arming().count_off();
        count.on.store(true);
        result = arming().count_on();
        if (result < 0) count.on.store(false);
    }
    count_unlock();
    return result;
}

int64_t hs_gate_count_stop(void) {
    count_lock();
    int64_t counted = -EINVAL;
    if (count.on.exchange(false)) {
        arming().count_off();
        counted = count.operators.load();
    }
    count_unlock();
    return counted;
}
