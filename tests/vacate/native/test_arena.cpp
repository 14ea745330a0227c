/* The arena with real memory, without torch: `test_arena NAME`. A driver in between has each call fail, or hang, when it is
 * told to. A failed CHECK prints where, and ends the process with 1; an alarm ends one that hangs. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "known_memory.h"

namespace {

/* --- the driver that goes wrong */

struct Faults {
    std::string call;         /* "" : none */
    int nth = 0;              /* from 1; each call is counted from arm() on */
    int error = -EIO;         /* 0: it hangs until `go_on`, and works then */
    int seen = 0;
    std::atomic<bool> hangs{false}, go_on{false};

    void arm(const std::string &which, int number, int how) {
        call = which, nth = number, error = how, seen = 0;
        hangs = go_on = false;
    }
    int at(const char *which) {
        if (call != which || ++seen != nth) return 0;
        if (error) return error;
        hangs = true;
        while (!go_on) usleep(200);
        return 0;
    }
} faults;

hs_vm_driver *real;

#define FAULTY(name, parameters, ...)                      \
    int faulty_##name parameters {                         \
        if (const int error = faults.at(#name)) return error; \
        return real->name(nullptr, ##__VA_ARGS__);         \
    }
FAULTY(reserve, (void *, size_t bytes, uintptr_t *at), bytes, at)
FAULTY(create, (void *, hs_vm *piece), piece)
FAULTY(map, (void *, const hs_vm *piece), piece)
FAULTY(open, (void *, hs_vm *piece), piece)
FAULTY(set_access, (void *, const hs_vm *piece, int access), piece, access)
FAULTY(unmap, (void *, const hs_vm *piece), piece)
FAULTY(release, (void *, const hs_vm *piece), piece)
FAULTY(copy_to_host, (void *, const hs_vm *piece, size_t at, void *host, size_t bytes), piece, at, host, bytes)
FAULTY(copy_from_host, (void *, const hs_vm *piece, size_t at, const void *host, size_t bytes), piece, at, host, bytes)
FAULTY(synchronize, (void *))
FAULTY(host_alloc, (void *, size_t bytes, void **host), bytes, host)
FAULTY(host_free, (void *, void *host, size_t bytes), host, bytes)

const char *const kCalls[] = {"create",      "map",         "open",           "set_access", "unmap",     "release",
                              "copy_to_host", "copy_from_host", "synchronize", "host_alloc", "host_free"};

hs_arena *open_faulty() {
    static hs_vm_driver driver;
    real = hs_page_driver();
    driver = {nullptr,        real->granularity, real->alignment,     real->touched_by_threads, faulty_reserve,
              faulty_create,   faulty_map,          faulty_open,              faulty_set_access,
              faulty_unmap,   faulty_release,    faulty_copy_to_host, faulty_copy_from_host,    faulty_synchronize,
              faulty_host_alloc, faulty_host_free, nullptr};
    hs_arena *arena = nullptr;
    CHECK(hs_arena_open(&arena, &driver) == 0);
    return arena;
}

size_t resident(const std::map<uint64_t *, size_t> &blocks) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps);
    char line[512];
    unsigned long from = 0, to = 0;
    size_t kib = 0, sum = 0;
    bool inside = false;
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) {
            inside = false;
            for (const auto &one : blocks) {
                const auto at = reinterpret_cast<uintptr_t>(one.first);
                inside = inside || (at >= from && at < to);
            }
        } else if (inside && sscanf(line, "Rss: %zu kB", &kib) == 1) {
            sum += kib * 1024;
        }
    }
    fclose(maps);
    return sum;
}

/* --- the tests */

/* Wrong arguments and states are refused, and change nothing. */
void refuses() {
    hs_arena *arena = nullptr;
    hs_vm_driver odd = *hs_page_driver();
    odd.granularity = 3;
    CHECK(hs_arena_open(&arena, &odd) == -EINVAL);
    CHECK(hs_arena_open(&arena, nullptr) == -EINVAL);
    arena = open_faulty();
    void *block = nullptr;
    CHECK(hs_arena_alloc(arena, 0, 0, 0, &block) == -EINVAL);
    CHECK(hs_arena_alloc(arena, ~size_t{0}, 0, 0, &block) == -EINVAL);
    CHECK(hs_arena_free(arena, &block) == -ENOENT);
    Memory memory = usual(arena);
    CHECK(hs_arena_free(arena, reinterpret_cast<char *>(memory.blocks.begin()->first) + 64) == -ENOENT);
    int64_t freed = 1;
    CHECK(hs_arena_checkpoint(arena, &freed) == -EPROTO && freed == 0);
    CHECK(hs_arena_restore(arena) == -EPROTO && hs_arena_unlock(arena) == -EPROTO);
    CHECK(hs_arena_abandon(arena) == -EBUSY);
    away(arena);
    CHECK(hs_arena_alloc(arena, 64, 0, 0, &block) == -EPROTO);
    CHECK(hs_arena_spill(arena, -1) == -EPROTO);
    CHECK(hs_arena_unlock(arena) == -EPROTO);
    back(arena);
    memory.check();
}

/* All physical memory goes, and only what lives is copied; it comes back to the same addresses, again and again. */
void cycles() {
    hs_arena *arena = open_faulty();
    Memory memory = usual(arena);
    for (int i = 0; i < 5; ++i) {
        const size_t before = resident(memory.blocks);
        CHECK(before >= 21 * kMiB);
        CHECK(away(arena) == numbers(arena).away_bytes);
        CHECK(numbers(arena).mapped_bytes == 0);
        CHECK(resident(memory.blocks) == 0);
        CHECK(numbers(arena).staging_bytes < int64_t(23 * kMiB)); /* not the hole */
        back(arena);
        CHECK(numbers(arena).staging_bytes == 0 && numbers(arena).away_bytes == 0);
        memory.check();
        memory.remove(memory.add((i + 1) * kMiB));
    }
}

/* Blocks are reused for their own stream only, joined when they are free, and given up when too many idle. */
void reuse() {
    hs_arena *arena = open_faulty();
    Memory memory{arena, {}};
    uint64_t *one = memory.add(kMiB, 1), *other = memory.add(kMiB, 2);
    memory.remove(one);
    CHECK(memory.add(kMiB, 2) != one);
    CHECK(memory.add(kMiB, 1) == one);
    CHECK(other != one);
    for (int i = 0; i < 8; ++i) memory.remove(memory.add((64 + i) * kMiB));
    CHECK(numbers(arena).mapped_bytes < int64_t(420 * kMiB));
    memory.check();
    /* no memory free: what idles is given back, and taken */
    faults.arm("create", 1, -ENOMEM);
    memory.add(100 * kMiB, 3);
    CHECK(faults.seen == 2);
    memory.check();
}

/* No addresses are left, or no memory: the caller is told, nothing is kept of it, and the next request is served. */
void no_segment() {
    for (const char *call : {"reserve", "create", "map", "open"}) {
        for (const int error : {-ENOMEM, -EIO}) {
            hs_arena *arena = open_faulty();
            void *block = nullptr;
            faults.arm(call, 1, error);
            CHECK(hs_arena_alloc(arena, 9 * kMiB, 0, 0, &block) == error && block == nullptr);
            CHECK(strcmp(numbers(arena).failed, call) == 0);
            CHECK(numbers(arena).segments == 0 && numbers(arena).mapped_bytes == 0 && numbers(arena).live_bytes == 0);
            CHECK(!hs_arena_owns(arena, arena));
            Memory memory = usual(arena);
            away(arena);
            back(arena);
            memory.check();
        }
    }
}

/* Each call of the driver's fails once, at each place of a cycle. Nothing is lost: after it the bits are there, and the
 * next cycle works. */
void every_failure() {
    hs_arena *arena = open_faulty();
    Memory memory = usual(arena);
    for (const char *call : kCalls) {
        int reached = 0;
        bool was_reached = true;
        for (int nth = 1; nth <= 8 && was_reached; ++nth) {
            for (const int error : {-ENOMEM, -EIO}) {
                faults.arm(call, nth, error);
                int64_t freed = 0;
                int tries = 0;
                if (hs_arena_lock(arena) == 0) {
                    const bool done = hs_arena_checkpoint(arena, &freed) == 0;
                    const int state = hs_arena_state(arena);
                    CHECK(state == HS_CHECKPOINTED || (state == HS_LOCKED && !done));
                    if (state == HS_LOCKED) CHECK(numbers(arena).away_bytes == 0);
                    while (hs_arena_state(arena) == HS_CHECKPOINTED) CHECK(hs_arena_restore(arena) == 0 || ++tries < 3);
                    while (hs_arena_state(arena) == HS_LOCKED) CHECK(hs_arena_unlock(arena) == 0 || ++tries < 4);
                }
                was_reached = faults.seen >= nth;
                reached += was_reached;
                if (faults.seen >= nth) CHECK(strcmp(numbers(arena).failed, call) == 0);
                faults.arm("", 0, 0);
                CHECK(hs_arena_state(arena) == HS_RUNNING);
                memory.check();
                CHECK(numbers(arena).mapped_bytes >= numbers(arena).live_bytes);
            }
        }
        CHECK(reached > 0);
    }
    away(arena);
    CHECK(resident(memory.blocks) == 0);
    back(arena);
    memory.check();
}

/* A lock or a copy that hangs is given up: nothing has changed, and the training goes on while it hangs. When it ends at
 * last, memory can be taken away again. */
void hang_before() {
    hs_arena *arena = open_faulty();
    Memory memory = usual(arena);
    for (const char *call : {"synchronize", "copy_to_host"}) {
        const bool locks = strcmp(call, "synchronize") == 0;
        if (!locks) CHECK(hs_arena_lock(arena) == 0);
        faults.arm(call, 1, 0);
        std::atomic<int> result{1};
        std::thread worker([&] {
            int64_t freed = 0;
            result = locks ? hs_arena_lock(arena) : hs_arena_checkpoint(arena, &freed);
        });
        while (!faults.hangs) usleep(100);
        CHECK(hs_arena_state(arena) == HS_MOVING);
        CHECK(hs_arena_abandon(arena) == 0);
        CHECK(hs_arena_state(arena) == (locks ? HS_RUNNING : HS_LOCKED));
        if (!locks) CHECK(hs_arena_unlock(arena) == 0);
        CHECK(hs_arena_lock(arena) == -EBUSY);
        uint64_t *block = memory.add(2 * kMiB); /* it trains on */
        memory.check();
        memory.remove(block);
        faults.go_on = true;
        worker.join();
        CHECK(result == -ECANCELED);
        CHECK(numbers(arena).staging_bytes == 0);
        away(arena);
        back(arena);
        memory.check();
    }
}

/* A hang elsewhere cannot be given up, and is told as such; if it ends, all is as it should be. */
void hang_behind() {
    for (const char *call : {"host_alloc", "set_access", "unmap", "release", "create", "map", "open", "copy_from_host",
                             "host_free"}) {
        hs_arena *arena = open_faulty();
        Memory memory = usual(arena);
        const std::string name = call;
        const bool away_call = name == "host_alloc" || name == "set_access" || name == "unmap" || name == "release";
        int64_t freed = 0;
        if (!away_call) away(arena);
        if (away_call) CHECK(hs_arena_lock(arena) == 0);
        faults.arm(call, 1, 0);
        std::thread worker([&] { CHECK((away_call ? hs_arena_checkpoint(arena, &freed) : hs_arena_restore(arena)) == 0); });
        while (!faults.hangs) usleep(100);
        CHECK(hs_arena_abandon(arena) == -EBUSY);
        CHECK(hs_arena_state(arena) == HS_MOVING);
        faults.go_on = true;
        worker.join();
        if (away_call) CHECK(hs_arena_restore(arena) == 0);
        CHECK(hs_arena_unlock(arena) == 0);
        memory.check();
    }
}

/* A thread that nobody holds reads and writes all the time: it never sees another bit, and nothing of its is lost. */
void touching() {
    hs_arena *arena = open_faulty();
    Memory memory = usual(arena);
    uint64_t *counter = memory.add(kMiB);
    memory.blocks.erase(counter);
    *counter = 0;
    std::atomic<bool> ends{false};
    std::atomic<uint64_t> wanted{0};
    std::thread toucher([&] {
        while (!ends) {
            CHECK(*counter == wanted);
            *counter += 1;
            wanted += 1;
            memory.check();
        }
    });
    for (int i = 0; i < 40; ++i) {
        away(arena);
        if (i % 2) usleep(3000);
        back(arena);
    }
    ends = true;
    toucher.join();
    CHECK(*counter == wanted && wanted > 0);
    CHECK(numbers(arena).touched > 0);
    memory.check();
}

/* The copy goes to a file, and none of it stays in memory. A file that cannot hold it is a failure that changes nothing. */
void spilling() {
    hs_arena *arena = open_faulty();
    Memory memory = usual(arena);
    FILE *file = tmpfile();
    CHECK(file && hs_arena_spill(arena, fileno(file)) == 0);
    away(arena);
    CHECK(lseek(fileno(file), 0, SEEK_END) >= off_t(21 * kMiB));
    int go[2];
    CHECK(pipe(go) == 0);
    const pid_t child = fork(); /* reads it from the file once the parent has done with that */
    if (child == 0) {
        alarm(20);
        char byte;
        CHECK(read(go[0], &byte, 1) == 1);
        memory.check();
        _exit(0);
    }
    back(arena);
    memory.check();
    CHECK(hs_arena_spill(arena, -1) == 0 && fclose(file) == 0);
    int status = 1;
    CHECK(write(go[1], "g", 1) == 1 && waitpid(child, &status, 0) == child && status == 0);
    const int full = fileno(fopen("/dev/full", "w"));
    CHECK(hs_arena_spill(arena, full) == 0);
    int64_t freed = 0;
    CHECK(hs_arena_lock(arena) == 0);
    CHECK(hs_arena_checkpoint(arena, &freed) < 0);
    CHECK(strcmp(numbers(arena).failed, "fallocate") == 0);
    CHECK(hs_arena_state(arena) == HS_LOCKED && hs_arena_unlock(arena) == 0);
    memory.check();
}

/* A forked child has its own: what it writes is not its parent's, also while the parent's memory is away. */
void forking() {
    hs_arena *arena = open_faulty();
    Memory memory = usual(arena);
    for (const bool gone : {false, true}) {
        if (gone) away(arena);
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            memory.check();
            for (auto &one : memory.blocks) one.first[0] = 7;
            int64_t freed = 0;
            CHECK(hs_arena_lock(arena) != 0 && hs_arena_checkpoint(arena, &freed) != 0);
            _exit(0);
        }
        int status = 1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        if (gone) back(arena);
        memory.check();
    }
}

/* Also in the middle of a move, wherever that is: the child never waits for what only its parent does. */
void forking_in_a_move() {
    for (const std::string call : {"copy_to_host", "unmap", "release", "create", "map", "copy_from_host", "open"}) {
        hs_arena *arena = open_faulty();
        Memory memory = usual(arena);
        const bool leaves = call == "copy_to_host" || call == "unmap" || call == "release";
        int64_t freed = 0;
        if (!leaves) away(arena);
        if (leaves) CHECK(hs_arena_lock(arena) == 0);
        faults.arm(call, 1, 0);
        std::thread mover([&] { CHECK((leaves ? hs_arena_checkpoint(arena, &freed) : hs_arena_restore(arena)) == 0); });
        while (!faults.hangs) usleep(100);
        std::thread goes_on([&] {
            usleep(5000); /* most often the fork has begun by then */
            faults.go_on = true;
        });
        const pid_t child = fork();
        if (child == 0) {
            alarm(10);
            memory.check();
            for (auto &one : memory.blocks) one.first[0] = 7;
            _exit(0);
        }
        int status = 1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        goes_on.join();
        mover.join();
        if (leaves) CHECK(hs_arena_restore(arena) == 0);
        CHECK(hs_arena_unlock(arena) == 0);
        memory.check();
    }
}

/* A fault of somebody else's goes to whoever was there before, and ends the process as ever. */
void others_faults() {
    hs_arena *arena = open_faulty();
    Memory memory = usual(arena);
    for (const bool handled : {false, true}) {
        const pid_t child = fork();
        if (child == 0) {
            signal(SIGSEGV, handled ? +[](int) { _exit(7); } : SIG_DFL);
            hs_arena *own = open_faulty();
            Memory mine = usual(own);
            away(own);
            back(own);
            *static_cast<volatile int *>(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) = 1;
            _exit(1);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(handled ? WEXITSTATUS(status) == 7 : WTERMSIG(status) == SIGSEGV);
    }
}

/* Without a driver of NVIDIA's there is a reason, and no device. */
void no_cuda() {
    const char *why = nullptr;
    if (hs_cuda_driver(0, &why)) return; /* here is one */
    CHECK(why && strlen(why) > 10);
    CHECK(!hs_cuda_driver(-1, &why));
}

const struct {
    const char *name;
    void (*run)();
} kTests[] = {{"refuses", refuses},         {"cycles", cycles},           {"reuse", reuse},
              {"no_segment", no_segment},
              {"every_failure", every_failure}, {"hang_before", hang_before}, {"hang_behind", hang_behind},
              {"touching", touching},       {"spilling", spilling},       {"forking", forking},
              {"forking_in_a_move", forking_in_a_move},
              {"others_faults", others_faults}, {"no_cuda", no_cuda}};

} // namespace

int main(int argc, char **argv) {
    alarm(60);
    for (const auto &one : kTests) {
        if (argc != 2) puts(one.name);
        if (argc == 2 && strcmp(argv[1], one.name) == 0) return one.run(), 0;
    }
    return argc != 2 ? 0 : 2;
}
