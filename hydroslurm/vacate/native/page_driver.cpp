/* Physical memory for machines without a device: anonymous pages. A piece is made and filled at a place of its own, and
 * moved to its addresses by mremap(), which is atomic: no thread sees one half filled. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "vm_driver.h"

namespace {

constexpr size_t kHuge = 2u << 20;

int told(bool good) { return good ? 0 : -errno; }

int none_at(uintptr_t at, size_t bytes) {
    void *found = mmap(reinterpret_cast<void *>(at), bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return told(found != MAP_FAILED);
}

/* Aligned, so that huge pages survive the move. */
int aligned(size_t bytes, int protection, uintptr_t *at) {
    void *found = mmap(nullptr, bytes + kHuge, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return -errno;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(found), good = (begin + kHuge - 1) & ~(kHuge - 1);
    if (good > begin) munmap(found, good - begin);
    if (begin + kHuge > good) munmap(reinterpret_cast<void *>(good + bytes), begin + kHuge - good);
    *at = good;
    return 0;
}

int reserve(void *, size_t bytes, uintptr_t *at) { return aligned(bytes, PROT_NONE, at); }

int create(void *, hs_vm *piece) {
    uintptr_t at = 0;
    if (const int error = aligned(piece->bytes, PROT_READ | PROT_WRITE, &at)) return error;
    madvise(reinterpret_cast<void *>(at), piece->bytes, MADV_HUGEPAGE); /* where the kernel has them */
    piece->handle = at;
    return 0;
}

int map(void *, const hs_vm *) { return 0; } /* open() does it, once it is filled */

int open(void *, hs_vm *piece) {
    void *made = reinterpret_cast<void *>(piece->handle), *target = reinterpret_cast<void *>(piece->at);
    if (mremap(made, piece->bytes, piece->bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) return -errno;
    piece->handle = 0; /* others may have those addresses from now on */
    return 0;
}

int set_access(void *, const hs_vm *piece, int access) {
    const int protection = access == HS_READ ? PROT_READ : PROT_READ | PROT_WRITE;
    return told(mprotect(reinterpret_cast<void *>(piece->at), piece->bytes, protection) == 0);
}

int unmap(void *, const hs_vm *piece) { return none_at(piece->at, piece->bytes); } /* its pages go with it */

int release(void *, const hs_vm *piece) {
    return piece->handle == 0 ? 0 : told(munmap(reinterpret_cast<void *>(piece->handle), piece->bytes) == 0);
}

int copy_to_host(void *, const hs_vm *piece, size_t offset, void *host, size_t bytes) {
    memcpy(host, reinterpret_cast<const char *>(piece->at) + offset, bytes);
    return 0;
}

int copy_from_host(void *, const hs_vm *piece, size_t offset, const void *host, size_t bytes) {
    memcpy(reinterpret_cast<char *>(piece->handle) + offset, host, bytes);
    return 0;
}

int synchronize(void *) { return 0; }

int host_alloc(void *, size_t bytes, void **host) {
    uintptr_t at = 0;
    if (const int error = aligned(bytes, PROT_READ | PROT_WRITE, &at)) return error;
    *host = reinterpret_cast<void *>(at);
    madvise(*host, bytes, MADV_HUGEPAGE);
    return 0;
}

int host_free(void *, void *host, size_t bytes) { return told(munmap(host, bytes) == 0); }

} // namespace

extern "C" hs_vm_driver *hs_page_driver(void) {
    static hs_vm_driver driver = {nullptr, kHuge, 64, 1, reserve, create, map, open, set_access, unmap, release,
                                  copy_to_host, copy_from_host, synchronize, host_alloc, host_free, nullptr};
    return &driver;
}
