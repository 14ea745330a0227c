#include "harness.h"

#include <time.h>

Fake fake;
thread_local bool fake_capture = false;

namespace {

std::atomic<bool> &is_on(hs::Callback which) { return which == hs::HOLD ? fake.armed : which == hs::LAUNCHES ? fake.bounding : fake.tracing; }
int on(hs::Callback which) {
    if (const int error = fake.hold_error.load(); which == hs::HOLD && error != 0) return error;
    if (which == hs::HOLD) ++fake.holds_on;
    is_on(which).store(true);
    return 0;
}
void off(hs::Callback which) {
    if (which == hs::HOLD) ++fake.holds_off;
    is_on(which).store(false);
}
bool any() { return fake.armed.load(); }
bool in_backward() { return false; }
bool capturing() { return fake_capture; }

void on_alarm(int) {
    static const char text[] = "the test hangs\n";
    [[maybe_unused]] const ssize_t written = write(2, text, sizeof text - 1);
    for (const hs_event &event : seen()) fprintf(stderr, "  kind %d signo %d causes %u held %d quiet %d\n", event.kind, event.signo, event.causes, event.held, event.quiet);
    _exit(2);
}

} // namespace

const hs::Arming &hs::arming() {
    static const Arming arming = {on, off, any, in_backward, capturing};
    return arming;
}

void fake_operator(const char *name) {
    if (fake.armed.load()) hs::operator_reached(name, false);
    if (fake.tracing.load()) hs::operator_traced(name, false);
    if (fake.bounding.load()) hs::operator_launches();
    fake.operators.fetch_add(1);
}

std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

void failed(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
    _exit(1);
}

void failed_eq(const char *file, int line, const char *what, long long seen, long long wanted) {
    fprintf(stderr, "%s:%d: %s is %lld, wanted %lld\n", file, line, what, seen, wanted);
    _exit(1);
}

hs_signal line(int signo, int action, uint32_t causes, uint32_t flags) { return {signo, action, causes, flags, 99}; }

std::vector<hs_signal> usual_table() {
    return {
        line(SIGUSR1, HS_ACTION_PAUSE, HS_CAUSE_USER),
        line(SIGUSR2, HS_ACTION_RESUME, HS_CAUSE_USER),
        line(SIGTSTP, HS_ACTION_PAUSE, HS_CAUSE_SLURM),
        line(SIGCONT, HS_ACTION_RESUME, HS_CAUSE_SLURM | HS_CAUSE_TERMINAL),
        line(SIGTERM, HS_ACTION_STOP, 0),
    };
}

int start(std::vector<hs_signal> &table, int event_fd) {
    return hs_gate_start(table.data(), static_cast<int>(table.size()), event_fd);
}

void start_usual() {
    std::vector<hs_signal> table = usual_table();
    CHECK_EQ(start(table), 0);
    for (const hs_signal &one : table) CHECK_EQ(one.result, 0);
}

hs_status status() {
    hs_status now;
    CHECK_EQ(hs_gate_status(&now), 0);
    return now;
}

pid_t fork_child() {
    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(4);
        alarm(60);
    }
    return child;
}

int exit_of(pid_t child) {
    int how = 0;
    CHECK_EQ(waitpid(child, &how, 0), child);
    return WIFSIGNALED(how) ? -WTERMSIG(how) : WEXITSTATUS(how);
}

void until(const std::function<bool()> &done) {
    while (!done()) {
        const timespec moment = {0, 100'000};
        nanosleep(&moment, nullptr);
    }
}

std::vector<hs_event> &seen() {
    static std::vector<hs_event> all;
    return all;
}

void read_events() {
    hs_event events[16];
    for (int n; (n = hs_gate_read(events, 16)) > 0;) seen().insert(seen().end(), events, events + n);
}

int count_of(int kind) {
    int n = 0;
    for (const hs_event &event : seen()) n += event.kind == kind;
    return n;
}

const hs_event &until_event(int kind, int n) {
    until([&] {
        read_events();
        return count_of(kind) >= n;
    });
    for (const hs_event &event : seen())
        if (event.kind == kind && --n == 0) return event;
    abort();
}

Trainer::Trainer(const char *name)
    : thread_([this, name] {
          if (*name != '\0') prctl(PR_SET_NAME, name);
          while (!end_.load()) {
              fake_operator();
              issued.fetch_add(1);
          }
      }) {}

Trainer::~Trainer() {
    end_.store(true);
    thread_.join();
}

int main(int argc, char **argv) {
    for (const Test &test : tests()) {
        if (argc == 2 && strcmp(argv[1], "--list") == 0) puts(test.name);
        if (argc == 2 && strcmp(argv[1], test.name) == 0) {
            signal(SIGALRM, on_alarm);
            alarm(60);
            test.run();
            return 0;
        }
    }
    return argc == 2 && strcmp(argv[1], "--list") == 0 ? 0 : 3;
}
