/* Drives the SPANK plugin as Slurm does, with an environment of the task's own behind spank_getenv() and spank_setenv().
 *
 *   spank_driver CONTEXT OPTION [NAME=VALUE ...]
 *
 * CONTEXT: local, allocator, remote, slurmd, script. OPTION: none, bare (no argument), or =VALUE; NULL for an argument
 * that Slurm leaves out. The rest is the environment of the task. Prints "refused" when the option was refused, then
 * what HYDROSLURM_PREEMPT is in the process and in the task, and with DRIVER_STEP, the id of the job step, whether the
 * pauses are held. Linked with the plugin's source, under sanitizers. */

#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <slurm/spank.h>

extern int slurm_spank_init(spank_t, int, char **);
extern int slurm_spank_init_post_opt(spank_t, int, char **);
extern int slurm_spank_task_init(spank_t, int, char **);

static const struct { const char *word; spank_context_t context; } contexts[] = {
    {"local", S_CTX_LOCAL}, {"allocator", S_CTX_ALLOCATOR}, {"remote", S_CTX_REMOTE},
    {"slurmd", S_CTX_SLURMD}, {"script", S_CTX_JOB_SCRIPT},
};
static spank_context_t context;
static struct spank_option *option;

spank_context_t spank_context(void) { return context; }

spank_err_t spank_option_register(spank_t spank, struct spank_option *opt)
{
    (void)spank;
    if (getenv("DRIVER_REFUSES_OPTION"))
        return ESPANK_BAD_ARG;
    option = opt;
    return ESPANK_SUCCESS;
}

/* the task's variables, in our own environment */
static const char *task_name(const char *name)
{
    static char buffer[200];
    snprintf(buffer, sizeof buffer, "TASK_%s", name);
    return buffer;
}

spank_err_t spank_getenv(spank_t spank, const char *var, char *buf, int len)
{
    (void)spank;
    const char *value = getenv(task_name(var));
    if (!value)
        return ESPANK_ENV_NOEXIST;
    if ((int)strlen(value) >= len)
        return ESPANK_NOSPACE;
    strcpy(buf, value);
    return ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t spank, const char *var, const char *val, int overwrite)
{
    (void)spank;
    if (getenv("DRIVER_REFUSES_ENV"))
        return ESPANK_ERROR;
    return setenv(task_name(var), val, overwrite) == 0 ? ESPANK_SUCCESS : ESPANK_ERROR;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
    (void)spank;
    const char *step = getenv("DRIVER_STEP");
    if (item != S_JOB_STEPID || !step)
        return ESPANK_NOT_AVAIL;
    va_list args;
    va_start(args, item);
    *va_arg(args, uint32_t *) = (uint32_t)strtoul(step, NULL, 0);
    va_end(args);
    return ESPANK_SUCCESS;
}

void slurm_error(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++)
        if (strcmp(argv[1], contexts[i].word) == 0) context = contexts[i].context;
    for (int i = 3; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        if (!equals) return 2;
        *equals = 0;
        setenv(task_name(argv[i]), equals + 1, 1);
    }
    int rc = slurm_spank_init(NULL, 0, NULL);
    if (strcmp(argv[2], "none") != 0 && option) {
        char *argument = argv[2][0] == '=' ? strdup(argv[2] + 1) : NULL;
        if (option->cb(option->val, argument, context == S_CTX_REMOTE) != ESPANK_SUCCESS) puts("refused");
        free(argument); /* Slurm keeps no promise about it either */
    }
    rc |= slurm_spank_init_post_opt(NULL, 0, NULL);
    if (context == S_CTX_REMOTE) rc |= slurm_spank_task_init(NULL, 0, NULL);
    char buffer[4096];
    const char *own = getenv("HYDROSLURM_PREEMPT");
    printf("process %s\n", own ? own : "-");
    printf("task %s\n", spank_getenv(NULL, "HYDROSLURM_PREEMPT", buffer, sizeof buffer) == ESPANK_SUCCESS ? buffer : "-");
    sigset_t mask;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    struct sigaction first, second;
    sigaction(SIGUSR1, NULL, &first);
    sigaction(SIGUSR2, NULL, &second);
    int blocked = sigismember(&mask, SIGUSR1) + sigismember(&mask, SIGUSR2);
    int ignored = (first.sa_handler == SIG_IGN) + (second.sa_handler == SIG_IGN);
    if (getenv("DRIVER_STEP")) puts(blocked == 2 && ignored == 2 ? "held" : blocked + ignored ? "half" : "free");
    return rc != ESPANK_SUCCESS;
}
