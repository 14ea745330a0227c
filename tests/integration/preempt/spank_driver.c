/* Drives the SPANK plugin as Slurm does, with an environment of its own behind spank_getenv() and spank_setenv().
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

static spank_context_t context = S_CTX_LOCAL;
static struct spank_option *option;
static char *names[64], *values[64];
static int n_vars;

spank_context_t spank_context(void) { return context; }

spank_err_t spank_option_register(spank_t spank, struct spank_option *opt)
{
    (void)spank;
    if (getenv("DRIVER_REFUSES_OPTION"))
        return ESPANK_BAD_ARG;
    option = opt;
    return ESPANK_SUCCESS;
}

spank_err_t spank_getenv(spank_t spank, const char *var, char *buf, int len)
{
    (void)spank;
    for (int i = 0; i < n_vars; i++)
        if (strcmp(names[i], var) == 0) {
            if ((int)strlen(values[i]) >= len)
                return ESPANK_NOSPACE;
            strcpy(buf, values[i]);
            return ESPANK_SUCCESS;
        }
    return ESPANK_ENV_NOEXIST;
}

spank_err_t spank_setenv(spank_t spank, const char *var, const char *val, int overwrite)
{
    (void)spank;
    (void)overwrite;
    if (getenv("DRIVER_REFUSES_ENV"))
        return ESPANK_ERROR;
    for (int i = 0; i < n_vars; i++)
        if (strcmp(names[i], var) == 0) {
            free(values[i]);
            values[i] = strdup(val);
            return ESPANK_SUCCESS;
        }
    names[n_vars] = strdup(var);
    values[n_vars++] = strdup(val);
    return ESPANK_SUCCESS;
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

static spank_context_t context_of(const char *word)
{
    if (strcmp(word, "local") == 0) return S_CTX_LOCAL;
    if (strcmp(word, "allocator") == 0) return S_CTX_ALLOCATOR;
    if (strcmp(word, "remote") == 0) return S_CTX_REMOTE;
    if (strcmp(word, "slurmd") == 0) return S_CTX_SLURMD;
    return S_CTX_JOB_SCRIPT;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    context = context_of(argv[1]);
    for (int i = 3; i < argc && n_vars < 64; i++) {
        char *equals = strchr(argv[i], '=');
        if (!equals) return 2;
        names[n_vars] = strndup(argv[i], (size_t)(equals - argv[i]));
        values[n_vars++] = strdup(equals + 1);
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
    for (int i = 0; i < n_vars; i++) {
        free(names[i]);
        free(values[i]);
    }
    return rc != ESPANK_SUCCESS;
}
