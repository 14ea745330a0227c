// Run a function one instruction at a time, and do something when a given one has been executed.
// For test_native_arming.py; x86-64 only (the trap flag).
#include <signal.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

constexpr greg_t kTrapFlag = 0x100;

long executed, wanted;
int signo;                // to be delivered behind the wanted instruction, 0: none
void (*call)() = nullptr; // to be called behind every instruction

void on_trap(int, siginfo_t *, void *context) {
    ++executed;
    if (call != nullptr) call();
    if (executed < wanted) return;
    static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_EFL] &= ~kTrapFlag;
    if (signo != 0) kill(getpid(), signo); // blocked here: its handler runs on top of the wanted instruction
}

} // namespace

// Returns how many instructions were executed step by step. -1: the function ended before the wanted one.
extern "C" long step_through(void (*function)(const void *), const void *argument, long until, int signo_then, void (*call_each)()) {
    struct sigaction action = {}, before = {};
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO;
    if (signo_then != 0) sigaddset(&action.sa_mask, signo_then);
    executed = 0;
    wanted = until;
    signo = signo_then;
    call = call_each;
    sigaction(SIGTRAP, &action, &before);
    asm volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
    function(argument);
    asm volatile("pushfq; andq $~0x100, (%%rsp); popfq" ::: "memory", "cc");
    const long seen = executed;
    sigaction(SIGTRAP, &before, nullptr);
    return seen;
}
