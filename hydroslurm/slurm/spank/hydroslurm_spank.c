/* hydroslurm_spank.c: the option --preempt[=pause|vacate|requeue] of srun, sbatch and salloc.
 *
 * What it does, and all that it does: the option becomes the variable HYDROSLURM_PREEMPT in every
 * process of the job. The Python package reads it (hydroslurm/runtime/autoload.py). Nothing here
 * can fail a job: without the option every callback returns at once, and with it the worst that can
 * happen is that the variable is missing and the script runs as it always did. The one refusal is
 * an unknown value, at submission, before there is a job.
 *
 * Where it runs:
 *   srun, sbatch, salloc   check the value; set the variable in their own environment, which they
 *                          hand to the job. So the sruns inside a batch script inherit it. srun also
 *                          sets HYDROSLURM_STEP_KEY, random and anew for each job step, by which its
 *                          ranks know each other (hydroslurm/coordination/secret.py); without it,
 *                          as with --export=NONE, they ask MUNGE.
 *   slurmstepd             set it in each task, the batch script included, for those who submit with
 *                          --export=NONE: that environment is not handed on, the option is. In the
 *                          tasks of srun SIGUSR1 and SIGUSR2, which would kill a rank that is still
 *                          starting, wait from before exec until the package takes them.
 *
 * Built against slurm/spank.h of the Slurm that is to load it, named in plugstack.conf as
 * "optional". Single-threaded where Slurm calls it; no allocation of its own.
 */

#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include <slurm/spank.h>

SPANK_PLUGIN(hydroslurm, 1);

#define VARIABLE "HYDROSLURM_PREEMPT"
#define KEY_VARIABLE "HYDROSLURM_STEP_KEY"
/* How Slurm hands the option of sbatch and salloc on to what runs in the job. */
#define FORWARDED "SLURM_SPANK__SLURM_SPANK_OPTION_hydroslurm_preempt"

/* SLURM_MAX_NORMAL_STEP_ID of slurm/slurm.h, which spank.h does without. */
#define MAX_NORMAL_STEP 0xfffffff0u

static const char *const modes[] = {"pause", "vacate", "requeue"};
#define MODES (sizeof(modes) / sizeof(modes[0]))

/* Points into modes; NULL when the option was not given to this process. */
static const char *chosen;

/* HYDROSLURM_PREEMPT=off wins over the option, so that one srun inside `sbatch --preempt` can go without: Slurm hands
 * the option of sbatch and salloc to every srun inside, as if it had been given there. */
static int is_off(const char *text)
{
    static const char *const words[] = {"off", "0", "no", "none", "false"};
    for (size_t i = 0; text != NULL && i < sizeof(words) / sizeof(words[0]); i++)
        if (strcasecmp(text, words[i]) == 0)
            return 1;
    return 0;
}

/* "(null)" is how Slurm 22.05 writes an option without argument into the environment of a job, from where the sruns
 * inside take it. */
static const char *mode_find(const char *text)
{
    if (text == NULL || *text == '\0' || strcmp(text, "(null)") == 0)
        return modes[0];
    for (size_t i = 0; i < MODES; i++)
        if (strcmp(text, modes[i]) == 0)
            return modes[i];
    return NULL;
}

static int option_take(int value, const char *argument, int remote)
{
    (void)value;
    const char *mode = mode_find(argument);
    if (mode == NULL && remote)
        return ESPANK_SUCCESS; /* checked before it came here; a job that runs is left alone */
    if (mode == NULL) {
        slurm_error("--preempt=%.60s: wanted \"pause\" (park in place, go on in place), "
                    "\"vacate\" (the same, and free the GPU meanwhile) or \"requeue\" (save, leave, be "
                    "requeued); --preempt alone means pause",
                    argument);
        return ESPANK_BAD_ARG;
    }
    chosen = mode;
    return ESPANK_SUCCESS;
}

static struct spank_option preempt_option = {
    "preempt",
    "[pause|vacate|requeue]",
    "make PyTorch ranks preemptible with hydroslurm: pause (the default) parks them "
    "between two operators; vacate also moves their device memory to the host; requeue is for scripts with a hydroslurm.Run, which save, "
    "leave and go on later",
    2, /* has an argument, which may be left out */
    0,
    option_take,
};

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
    (void)argc;
    (void)argv;
    switch (spank_context()) {
    case S_CTX_LOCAL:
    case S_CTX_ALLOCATOR:
    case S_CTX_REMOTE:
        chosen = NULL;
        if (spank_option_register(spank, &preempt_option) != ESPANK_SUCCESS)
            slurm_error("hydroslurm: --preempt could not be added; is there another plugin with "
                        "this option?");
        break;
    default: /* slurmd itself, prolog and epilog: nothing to do */
        break;
    }
    return ESPANK_SUCCESS;
}

/* In the environment, which only the user can read; not in an argument, which everybody can. */
static void key_set(void)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char bytes[32];
    char text[2 * sizeof(bytes) + 1];
    if (getrandom(bytes, sizeof(bytes), 0) != (ssize_t)sizeof(bytes)) {
        unsetenv(KEY_VARIABLE); /* an older one is not to be used again */
        return;
    }
    for (size_t i = 0; i < sizeof(bytes); i++) {
        text[2 * i] = digits[bytes[i] >> 4];
        text[2 * i + 1] = digits[bytes[i] & 15];
    }
    text[2 * sizeof(bytes)] = '\0';
    if (setenv(KEY_VARIABLE, text, 1) != 0)
        unsetenv(KEY_VARIABLE);
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char *argv[])
{
    (void)spank;
    (void)argc;
    (void)argv;
    if (chosen == NULL || spank_context() == S_CTX_REMOTE || is_off(getenv(VARIABLE)))
        return ESPANK_SUCCESS;
    if (setenv(VARIABLE, chosen, 1) != 0)
        slurm_error("hydroslurm: no memory for " VARIABLE "; the job will not be preemptible");
    if (spank_context() == S_CTX_LOCAL)
        key_set();
    return ESPANK_SUCCESS;
}

/* A task of srun's, not a batch script or an interactive shell: what they start is no rank. */
static int is_task(spank_t spank)
{
    uint32_t step = MAX_NORMAL_STEP;
    return spank_get_item(spank, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step < MAX_NORMAL_STEP;
}

/* Called in the task itself, just before exec, which keeps both the mask and what is ignored. The first keeps the
 * request; hydroslurm/runtime/autoload.py (hold) says why the second. */
static void pauses_hold(void)
{
    sigset_t pauses;
    sigemptyset(&pauses);
    sigaddset(&pauses, SIGUSR1);
    sigaddset(&pauses, SIGUSR2);
    const int failed = sigprocmask(SIG_BLOCK, &pauses, NULL);
    if (failed || signal(SIGUSR1, SIG_IGN) == SIG_ERR || signal(SIGUSR2, SIG_IGN) == SIG_ERR)
        slurm_error("hydroslurm: cannot hold SIGUSR1 and SIGUSR2; one that comes early kills this task");
}

int slurm_spank_task_init(spank_t spank, int argc, char *argv[])
{
    (void)argc;
    (void)argv;
    char present[16] = "", forwarded[16] = "";
    if (spank_getenv(spank, VARIABLE, present, sizeof(present)) == ESPANK_SUCCESS && is_off(present))
        return ESPANK_SUCCESS;
    /* Slurm gives the option to the tasks of srun. A batch script finds it in its environment only. */
    const char *mode = chosen;
    if (mode == NULL && spank_getenv(spank, FORWARDED, forwarded, sizeof(forwarded)) == ESPANK_SUCCESS)
        mode = mode_find(forwarded);
    if (mode != NULL && spank_setenv(spank, VARIABLE, mode, 1) != ESPANK_SUCCESS)
        slurm_error("hydroslurm: cannot set " VARIABLE "; this task will not be preemptible");
    if (mode == NULL && *present != '\0')
        mode = mode_find(present); /* set by hand, or by `hydroslurm submit` */
    if (mode != NULL && is_task(spank))
        pauses_hold();
    return ESPANK_SUCCESS;
}
