/* A tool that NVTX loads by NVTX_INJECTION64_PATH: writes the marks and ranges of the domain "hydroslurm" to the file that
 * NVTX_LISTENER_FILE names, one "mark NAME", "begin NAME" or "push NAME" a line. */
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

struct Domain {
    std::string name;
};

std::mutex lock;
FILE *file;

void write_down(const char *what, nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    if (domain == nullptr || file == nullptr || reinterpret_cast<Domain *>(domain)->name != "hydroslurm") return;
    const bool registered = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
    const char *name = registered ? reinterpret_cast<const char *>(event->message.registered) : event->message.ascii;
    const std::lock_guard<std::mutex> held(lock);
    fprintf(file, "%s %s\n", what, name == nullptr ? "" : name);
    fflush(file);
}

nvtxDomainHandle_t create(const char *name) { return reinterpret_cast<nvtxDomainHandle_t>(new Domain{name}); }
nvtxStringHandle_t intern(nvtxDomainHandle_t, const char *text) { return reinterpret_cast<nvtxStringHandle_t>(strdup(text)); }
void mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) { write_down("mark", domain, event); }
nvtxRangeId_t begin(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    static std::atomic<nvtxRangeId_t> number{0};
    write_down("begin", domain, event);
    return ++number;
}
int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    write_down("push", domain, event);
    return 0;
}

template <typename Function>
void subscribe(NvtxFunctionTable table, unsigned size, int id, Function *function) {
    if (static_cast<unsigned>(id) < size) *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

} // namespace

/* Called once by each library that has NVTX's headers compiled in. */
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
    const auto *callbacks = static_cast<const NvtxExportTableCallbacks *>(get(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    unsigned size = 0;
    if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    const char *path = getenv("NVTX_LISTENER_FILE");
    {
        const std::lock_guard<std::mutex> held(lock);
        if (file == nullptr && path != nullptr) file = fopen(path, "a");
    }
    subscribe(table, size, NVTX_CBID_CORE2_DomainCreateA, create);
    subscribe(table, size, NVTX_CBID_CORE2_DomainRegisterStringA, intern);
    subscribe(table, size, NVTX_CBID_CORE2_DomainMarkEx, mark);
    subscribe(table, size, NVTX_CBID_CORE2_DomainRangeStartEx, begin);
    subscribe(table, size, NVTX_CBID_CORE2_DomainRangePushEx, push);
    return 1;
}
