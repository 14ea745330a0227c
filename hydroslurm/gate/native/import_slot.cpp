/* Where a loaded library keeps the address of a function of its own that it calls: its entry of the global offset table. */
#include <dlfcn.h>
#include <link.h>

#include "internal.h"

namespace hs {
namespace {

using Address = ElfW(Addr);

struct Tables {
    const ElfW(Rela) *calls = nullptr;
    size_t n_calls = 0;
    const ElfW(Sym) *symbols = nullptr;
    bool has_addends = false;
};

/* The loader has made these addresses absolute, except on a few machines. */
template <typename Entry> const Entry *table_at(const link_map &library, Address where) noexcept {
    return reinterpret_cast<const Entry *>(where < library.l_addr ? where + library.l_addr : where);
}

Tables tables_of(const link_map &library) noexcept {
    Tables tables;
    for (const ElfW(Dyn) *entry = library.l_ld; entry->d_tag != DT_NULL; ++entry) {
        if (entry->d_tag == DT_JMPREL) tables.calls = table_at<ElfW(Rela)>(library, entry->d_un.d_ptr);
        if (entry->d_tag == DT_PLTRELSZ) tables.n_calls = entry->d_un.d_val / sizeof(ElfW(Rela));
        if (entry->d_tag == DT_SYMTAB) tables.symbols = table_at<ElfW(Sym)>(library, entry->d_un.d_ptr);
        if (entry->d_tag == DT_PLTREL) tables.has_addends = entry->d_un.d_val == DT_RELA;
    }
    return tables;
}

struct Place {
    Address library;
    Address address;
    bool is_writable;
};

/* The segment is writable, and the loader has taken the right away from the part that it finished before the program began. */
int look_at_segments(dl_phdr_info *info, size_t, void *place_of) noexcept {
    Place &place = *static_cast<Place *>(place_of);
    if (info->dlpi_addr != place.library) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) &segment = info->dlpi_phdr[i];
        const Address begin = info->dlpi_addr + segment.p_vaddr;
        if (place.address < begin || place.address >= begin + segment.p_memsz) continue;
        if (segment.p_type == PT_LOAD) place.is_writable = (segment.p_flags & PF_W) != 0;
        if (segment.p_type == PT_GNU_RELRO) {
            place.is_writable = false;
            break; /* it comes behind the segments that are loaded */
        }
    }
    return 1;
}

/* The function's own address, or code of the same library that will look it up at the first call. */
bool leads_to(const void *value, const void *function, const link_map *library) noexcept {
    if (value == function) return true;
    Dl_info info;
    link_map *found = nullptr;
    return dladdr1(value, &info, reinterpret_cast<void **>(&found), RTLD_DL_LINKMAP) != 0 && found == library;
}

} // namespace

void **import_slot(const void *function) noexcept {
    Dl_info info;
    link_map *library = nullptr;
    if (dladdr1(function, &info, reinterpret_cast<void **>(&library), RTLD_DL_LINKMAP) == 0 || library == nullptr) return nullptr;
    const Tables tables = tables_of(*library);
    if (tables.calls == nullptr || tables.symbols == nullptr || !tables.has_addends) return nullptr;
    const Address wanted = reinterpret_cast<Address>(function) - library->l_addr;
    for (size_t i = 0; i < tables.n_calls; ++i) {
        const ElfW(Rela) &call = tables.calls[i];
        if (tables.symbols[ELF64_R_SYM(call.r_info)].st_value != wanted) continue;
        void **slot = reinterpret_cast<void **>(library->l_addr + call.r_offset);
        Place place = {library->l_addr, reinterpret_cast<Address>(slot), false};
        dl_iterate_phdr(look_at_segments, &place);
        void *value = __atomic_load_n(slot, __ATOMIC_SEQ_CST);
        if (!place.is_writable || !leads_to(value, function, library)) return nullptr;
        __atomic_store_n(slot, const_cast<void *>(function), __ATOMIC_SEQ_CST); /* what a first call would do */
        return slot;
    }
    return nullptr;
}

} // namespace hs
