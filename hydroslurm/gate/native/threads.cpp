/* Threads of this process, from /proc. For the watcher; nothing here is signal-safe. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

namespace hs {
namespace {

/* Read a small file whole, and end it with NUL. Returns the length, -1 on error. */
template <size_t N> ssize_t read_small(const char *path, char (&text)[N]) noexcept {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    const ssize_t length = read(fd, text, N - 1);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    return length;
}

template <size_t N> ssize_t read_task(pid_t tid, const char *file, char (&text)[N]) noexcept {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", tid, file);
    return read_small(path, text);
}

/* Time on a CPU, else (a kernel without scheduler statistics) the number of context switches: both are constant exactly while
 * the thread does not run. */
bool read_ran(pid_t tid, uint64_t &ran) noexcept {
    char text[2048];
    if (read_task(tid, "schedstat", text) > 0) {
        ran = strtoull(text, nullptr, 10);
        if (ran > 0) return true;
    }
    if (read_task(tid, "status", text) <= 0) return false;
    const char *voluntary = strstr(text, "\nvoluntary_ctxt_switches:");
    const char *forced = strstr(text, "\nnonvoluntary_ctxt_switches:");
    if (voluntary == nullptr || forced == nullptr) return false;
    ran = strtoull(strchr(voluntary, ':') + 1, nullptr, 10) + strtoull(strchr(forced, ':') + 1, nullptr, 10);
    return true;
}

pid_t parent_of(pid_t pid) noexcept {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (read_small(path, text) <= 0) return -1;
    const char *after_name = strrchr(text, ')'); /* the name may contain blanks and brackets */
    int parent = -1;
    if (after_name == nullptr || sscanf(after_name, ") %*c %d", &parent) != 1) return -1;
    return parent;
}

bool starts(const char *text, const char *prefix) noexcept { return strncmp(text, prefix, strlen(prefix)) == 0; }

} // namespace

bool name_is_autograd(const char *comm) noexcept { return starts(comm, "pt_autograd_"); }

bool name_is_collective(const char *comm) noexcept {
    return starts(comm, "pt_gloo") || starts(comm, "pt_nccl") || starts(comm, "pt_tcpstore");
}

void thread_name(pid_t tid, char (&comm)[16]) noexcept {
    char text[32];
    comm[0] = '\0';
    if (read_task(tid, "comm", text) <= 0) return;
    text[strcspn(text, "\n")] = '\0';
    snprintf(comm, sizeof comm, "%.15s", text);
}

std::vector<pid_t> autograd_threads() {
    std::vector<pid_t> found;
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == nullptr) return found;
    while (const dirent *entry = readdir(tasks)) {
        const pid_t tid = atoi(entry->d_name);
        char comm[16];
        if (tid <= 0) continue;
        thread_name(tid, comm);
        if (name_is_autograd(comm)) found.push_back(tid);
    }
    closedir(tasks);
    return found;
}

Activity thread_activity(pid_t tid) noexcept {
    char text[512];
    Activity activity = {Activity::UNKNOWN, 0};
    if (read_task(tid, "stat", text) <= 0) {
        if (syscall(SYS_tgkill, getpid(), tid, 0) != 0 && errno == ESRCH) activity.state = Activity::GONE;
        return activity;
    }
    const char *after_name = strrchr(text, ')');
    const char state = after_name != nullptr && after_name[1] == ' ' ? after_name[2] : '?';
    if (strchr("ZXx", state) != nullptr)
        activity.state = Activity::GONE;
    else if (strchr("SDTt", state) == nullptr)
        activity.state = Activity::RUNNING;
    else if (read_ran(tid, activity.ran))
        activity.state = Activity::ASLEEP;
    return activity;
}

/* POSIX: a group is orphaned when no member's parent is outside the group and inside the session; nobody could continue it,
 * so the kernel does not stop it for a SIGTSTP. We check only our own ancestors. */
bool terminal_may_stop_us() noexcept {
    const pid_t group = getpgrp(), session = getsid(0);
    pid_t parent = getppid();
    while (parent > 0 && getpgid(parent) == group) parent = parent_of(parent);
    return parent > 0 && getsid(parent) == session;
}

} // namespace hs
