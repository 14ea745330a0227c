/* An allocator whose memory can be moved away while its addresses stay: copied to the host, unmapped, and later mapped at the
 * same addresses and copied back, bit for bit. What is not allocated is not copied.
 *
 * Blocks are carved from segments; a segment is one piece of physical memory. Blocks of one stream are reused for that
 * stream only, as kernels of another one may still use them. States are those of CUDA's checkpoint API:
 *
 *     RUNNING -lock-> LOCKED -checkpoint-> CHECKPOINTED -restore-> LOCKED -unlock-> RUNNING
 *
 * checkpoint() copies everything first: until then nothing has changed, and a failure leaves LOCKED. It then unmaps; a failure
 * there leaves CHECKPOINTED, with a part away. restore() brings back what is away, goes on after a failure where it was, and
 * may be called until it works. Each of the four may hang where its driver does; state(), abandon() and stats() never do.
 *
 * Functions return 0 or -errno: -EPROTO a wrong state, -EBUSY a call that was given up still hangs, else the driver's.
 * All may be called from any thread; nothing prints or throws. alloc() and free() never wait for memory that is away. */
#ifndef HYDROSLURM_ARENA_H
#define HYDROSLURM_ARENA_H

#include "vm_driver.h"

#define HS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define HS_ARENA_ABI 2

enum hs_arena_state_of { HS_RUNNING = 0, HS_LOCKED = 1, HS_CHECKPOINTED = 2, HS_MOVING = 3 };

struct hs_arena_numbers {
    int64_t live_bytes;     /* in blocks that are allocated */
    int64_t mapped_bytes;   /* physical memory that is in place */
    int64_t away_bytes;     /* physical memory that was given back */
    int64_t staging_bytes;  /* host memory that holds the copy, or is kept for the next */
    int64_t leaked_bytes;   /* physical memory that the driver did not take back */
    int64_t segments;
    int64_t touched;        /* segments that came back early, because a thread touched them */
    const char *failed;     /* the driver's call that failed last; "" if none has */
    const char *why;        /* the driver's own name of that error; "" if it has none */
};

struct hs_arena;

HS_API int hs_arena_abi(void);
/* For the life of the process. The driver must live as long. */
HS_API int hs_arena_open(struct hs_arena **arena, struct hs_vm_driver *driver);
/* `stream` tells apart who may reuse whose blocks. flags: HS_CAPTURED. -ENOMEM; -EPROTO: the memory is away. */
#define HS_CAPTURED 1 /* a CUDA graph uses these segments whenever it is replayed: they are never given up, free blocks and all */
HS_API int hs_arena_alloc(struct hs_arena *arena, size_t bytes, uint64_t stream, int flags, void **block);
HS_API int hs_arena_free(struct hs_arena *arena, void *block); /* -ENOENT: not one of its blocks */
HS_API int hs_arena_owns(const struct hs_arena *arena, const void *address);
/* Give back what has no live block, as torch.cuda.empty_cache() does. */
HS_API int hs_arena_trim(struct hs_arena *arena);
/* Copy to this file from now on, not to memory; -1: to memory. Stays the caller's. In RUNNING and LOCKED. What was copied stays
 * in it, for children that were forked meanwhile; so take another one for the next time. */
HS_API int hs_arena_spill(struct hs_arena *arena, int fd);

HS_API int hs_arena_lock(struct hs_arena *arena);
HS_API int hs_arena_checkpoint(struct hs_arena *arena, int64_t *freed_bytes);
HS_API int hs_arena_restore(struct hs_arena *arena);
HS_API int hs_arena_unlock(struct hs_arena *arena);
HS_API int hs_arena_state(const struct hs_arena *arena);
/* Give up a checkpoint() that hangs in its copy: LOCKED again, and nothing has changed. -EBUSY: it is not in its copy. */
HS_API int hs_arena_abandon(struct hs_arena *arena);
HS_API void hs_arena_stats(struct hs_arena *arena, struct hs_arena_numbers *numbers);

/* torch's side. Serve its CPU allocations of `floor` bytes and more from an arena, for the life of the process. */
HS_API int hs_arena_serve_cpu(size_t floor, struct hs_arena **arena);
/* For torch.cuda.memory.CUDAPluggableAllocator; throw torch's OutOfMemoryError. */
HS_API void *hs_arena_cuda_alloc(size_t bytes, int device, void *stream);
HS_API void hs_arena_cuda_free(void *block, size_t bytes, int device, void *stream);
HS_API void hs_arena_cuda_record_stream(void *block, void *stream);
HS_API void hs_arena_cuda_empty_cache(void); /* set_reset_fn() */
HS_API int hs_arena_cuda_arena(int device, struct hs_arena **arena); /* -ENOENT: nothing was allocated there yet */
HS_API const char *hs_arena_why_no_cuda(void); /* opens libcuda; "" where there is a device that can do it */

#ifdef __cplusplus
}
#endif
#endif
