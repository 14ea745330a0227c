#include "host_reduce.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {

struct Half16 {
    uint16_t bits;
};
struct Brain16 {
    uint16_t bits;
};
using Kernel = void (*)(void *, const void *const *, int, int64_t, double);

} // namespace

/* --- the kernels, for each kind of processor ------------------------------------------------------------------ */

#define HS_BITS                                      \
    static inline float float_of(uint32_t bits) {    \
        float value;                                 \
        memcpy(&value, &bits, sizeof(value));        \
        return value;                                \
    }                                                \
    static inline uint32_t bits_of(float value) {    \
        uint32_t bits;                               \
        memcpy(&bits, &value, sizeof(bits));         \
        return bits;                                 \
    }

namespace plain {
HS_BITS
#include "kernels.inc"
} // namespace plain

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HS_VARIANTS 1
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
HS_BITS
#include "kernels.inc"
} // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
HS_BITS
#include "kernels.inc"
} // namespace avx512
#pragma GCC pop_options
#endif

namespace {

Kernel find_kernel(int out_type, int in_type, int accumulate) {
#ifdef HS_VARIANTS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return avx512::kernel(out_type, in_type, accumulate);
    if (__builtin_cpu_supports("avx2")) return avx2::kernel(out_type, in_type, accumulate);
#endif
    return plain::kernel(out_type, in_type, accumulate);
}

/* --- waiting ---------------------------------------------------------------------------------------------------- */

constexpr int kLooks = 64; /* some microseconds: whoever waits longer gives its processor up */

uint32_t load_word(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

bool reached(uint32_t seen, uint32_t target) { return static_cast<int32_t>(seen - target) >= 0; }

long futex(uint32_t *word, int operation, uint32_t value, const timespec *limit) {
    return syscall(SYS_futex, word, operation, value, limit, nullptr, 0); /* shared: not FUTEX_PRIVATE_FLAG */
}

void wake(uint32_t *word) { futex(word, FUTEX_WAKE, INT32_MAX, nullptr); }

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

} // namespace

int hs_reduce_abi(void) { return HS_REDUCE_ABI; }

int hs_reduce_wait(uint32_t *word, uint32_t target, const uint32_t *failed, int64_t slice_ns) {
    if (word == nullptr || failed == nullptr || slice_ns < 0) return -EINVAL;
    const int64_t deadline_ns = now_ns() + slice_ns;
    for (int look = 0;; ++look) {
        const uint32_t seen = load_word(word); /* before the failure: a result that is there counts */
        if (reached(seen, target)) return 0;
        if (load_word(failed) != 0) return -ECANCELED;
        if (look < kLooks) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        const int64_t left_ns = deadline_ns - now_ns();
        if (left_ns <= 0) return -ETIMEDOUT;
        const timespec limit = {static_cast<time_t>(left_ns / 1000000000), static_cast<long>(left_ns % 1000000000)};
        /* somebody who counts without reaching the target changes the word, and this returns at once: look again */
        futex(word, FUTEX_WAIT, seen, &limit);
    }
}

int hs_reduce_count(uint32_t *word, uint32_t target) {
    if (word == nullptr) return -EINVAL;
    const uint32_t now = __atomic_add_fetch(word, 1, __ATOMIC_ACQ_REL);
    if (reached(now, target)) wake(word);
    return 0;
}

int hs_reduce_fail(uint32_t *failed, uint32_t value, uint32_t *words, int n_words, int stride) {
    if (failed == nullptr || words == nullptr || value == 0 || n_words < 0 || stride < 1) return -EINVAL;
    uint32_t none = 0;
    __atomic_compare_exchange_n(failed, &none, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    for (int i = 0; i < n_words; ++i) wake(words + static_cast<int64_t>(i) * stride);
    return 0;
}

int hs_reduce_sum(void *out, int out_type, const void *const *in, int n_in, int in_type, int64_t count, int accumulate,
                  double scale) {
    const Kernel kernel = find_kernel(out_type, in_type, accumulate);
    if (kernel == nullptr || out == nullptr || in == nullptr || n_in < 1 || count < 0) return -EINVAL;
    kernel(out, in, n_in, count, scale);
    return 0;
}
