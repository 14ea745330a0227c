/* The seam between the arena and what the memory is made of: CUDA's virtual memory calls, or pages of this process.
 *
 * Functions return 0 or -errno; -ENOMEM: no physical memory is free just now. None prints, throws, or keeps a pointer that
 * it was given. `self` is the driver's own. */
#ifndef HYDROSLURM_VM_DRIVER_H
#define HYDROSLURM_VM_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A piece of physical memory, and the addresses that it belongs to. Both are multiples of the granularity. */
struct hs_vm {
    uintptr_t at;
    size_t bytes;
    uint64_t handle; /* of the physical memory, by create() */
};

enum hs_access { HS_READ = 1, HS_READ_WRITE = 3 };

struct hs_vm_driver {
    void *self;
    size_t granularity; /* of addresses and physical memory, bytes; a power of two */
    size_t alignment;   /* of what is handed out of it, bytes; a power of two */
    /* Flags. A host's threads can touch memory that is away, or is being copied: that is noticed (SIGSEGV), and set right.
     * Then create(), map(), copy_from_host() and open() are called from a signal handler, too. A device's cannot: its
     * queues are empty, and nobody launches anything. */
    int touched_by_threads;
    /* Addresses without memory, for the life of the process. */
    int (*reserve)(void *self, size_t bytes, uintptr_t *at);
    int (*create)(void *self, struct hs_vm *piece); /* sets the handle */
    int (*map)(void *self, const struct hs_vm *piece); /* to its addresses; only copy_from_host() may use it until open() */
    int (*open)(void *self, struct hs_vm *piece);      /* for everybody, to read and write; may change the handle */
    int (*set_access)(void *self, const struct hs_vm *piece, int access);
    int (*unmap)(void *self, const struct hs_vm *piece); /* the addresses stay reserved */
    int (*release)(void *self, const struct hs_vm *piece);
    int (*copy_to_host)(void *self, const struct hs_vm *piece, size_t offset, void *host, size_t bytes);
    int (*copy_from_host)(void *self, const struct hs_vm *piece, size_t offset, const void *host, size_t bytes);
    int (*synchronize)(void *self); /* until nothing that was launched uses the memory any more */
    /* Memory to copy to: pinned, for a device. */
    int (*host_alloc)(void *self, size_t bytes, void **host);
    int (*host_free)(void *self, void *host, size_t bytes);
    const char *(*why)(void *self); /* the driver's own name of this thread's last error; NULL: it has none but errno's */
};

/* Pages of this process. Anonymous and private, not a memfd's: a child that is forked (a worker of a data loader) must have its
 * own, and with a shared mapping it would write into its parent's weights. There is one. */
__attribute__((visibility("default"))) struct hs_vm_driver *hs_page_driver(void);

/* CUDA's virtual memory calls, on one device of at most 64. libcuda is opened by the first call. NULL: *why says why not. */
struct hs_vm_driver *hs_cuda_driver(int device, const char **why);
/* "" where it can be had. Opens libcuda and initialises it, and makes no context. */
const char *hs_cuda_why_not(int device);
/* Of a CUstream, once there is a driver. *id: of the capture that it takes part in, 0: of none. */
int hs_cuda_capture(void *stream, uint64_t *id);
int hs_cuda_stream_synchronize(void *stream);

#ifdef __cplusplus
}
#endif
#endif
