/* Sums of gradients in memory that the ranks of one node share, and the counters by which they wait for each other.
 *
 * Counters are 32-bit words in that memory. They only rise, and a wait is for a difference, so that they may wrap.
 * One more word says that the node has failed: whoever waits then returns at once.
 *
 * A sum adds the sources in the order in which they are given, element by element, in the accumulation type, and
 * multiplies, and rounds once (to nearest, ties to even). So the result of an element depends neither on its place nor on the
 * processor: every variant of the kernels does the same, without fused operations.
 *
 * Functions return 0, or -errno. Nothing here prints, allocates, throws or keeps anything. All may be called from any thread.
 */
#ifndef HYDROSLURM_HOST_REDUCE_H
#define HYDROSLURM_HOST_REDUCE_H

#include <stdint.h>

#define HS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define HS_REDUCE_ABI 1

enum hs_reduce_type { HS_FLOAT32 = 1, HS_FLOAT64 = 2, HS_BFLOAT16 = 3, HS_FLOAT16 = 4 };

HS_API int hs_reduce_abi(void);

/* Sleep until the word has come to `target`. -ETIMEDOUT: not within slice_ns, call again; -ECANCELED: *failed is not 0.
 * Takes no processor: it looks for a few microseconds, then sleeps on a futex. */
HS_API int hs_reduce_wait(uint32_t *word, uint32_t target, const uint32_t *failed, int64_t slice_ns);

/* Add 1, and wake those who wait if the word has come to `target` by that. */
HS_API int hs_reduce_count(uint32_t *word, uint32_t target);

/* Say that this node has failed, and wake everybody who waits at one of these words. */
HS_API int hs_reduce_fail(uint32_t *failed, uint32_t value, uint32_t *words, int n_words, int stride);

/* out[i] = scale * (in[0][i] + in[1][i] + ...); out may be one of the sources. accumulate: HS_FLOAT32 or HS_FLOAT64.
 * -EINVAL: an unknown type, a negative count, or no source. */
HS_API int hs_reduce_sum(void *out, int out_type, const void *const *in, int n_in, int in_type, int64_t count, int accumulate,
                         double scale);

#ifdef __cplusplus
}
#endif
#endif
