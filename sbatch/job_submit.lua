-- job_submit.lua: jobs that ask for --preempt go where jobs can be preempted.
--
-- For administrators. With hydroslurm's SPANK plugin (`hydroslurm spank install`) a user says
--
--     sbatch --preempt=requeue train.sbatch         srun --preempt python train.py
--
-- and need not know the names of partitions and QOSes, which stand below. Put this file beside
-- slurm.conf as job_submit.lua, or call route() from the one that is there, set
-- JobSubmitPlugins=lua, and say `scontrol reconfigure`.
--
-- A job that names a partition or a QOS itself keeps it. One that does not say --preempt is left
-- alone. Seen to work with Slurm 22.05.8.

local ROUTES = {
    pause = { partition = "low", qos = nil },
    requeue = { partition = "low", qos = nil },
}

local OPTION = "_SLURM_SPANK_OPTION_hydroslurm_preempt="

-- "pause", "requeue" or nil. An option without a value comes as "(null)" from Slurm 22.05.
local function mode_of(job_desc)
    local options = job_desc.spank_job_env
    if type(options) == "table" then
        for _, option in pairs(options) do
            if type(option) == "string" and option:sub(1, #OPTION) == OPTION then
                local value = option:sub(#OPTION + 1)
                if value == "" or value == "(null)" then
                    value = "pause"
                end
                return value
            end
        end
    end
    -- HYDROSLURM_PREEMPT=requeue sbatch ...: without the plugin
    local environment = job_desc.environment
    return type(environment) == "table" and environment["HYDROSLURM_PREEMPT"] or nil
end

local function route(job_desc)
    local mode = mode_of(job_desc)
    local to = mode and ROUTES[mode]
    if not to then
        return
    end
    if job_desc.partition == nil and to.partition ~= nil then
        job_desc.partition = to.partition
        slurm.log_user("--preempt=%s: partition %s", mode, to.partition)
    end
    if job_desc.qos == nil and to.qos ~= nil then
        job_desc.qos = to.qos
        slurm.log_user("--preempt=%s: QOS %s", mode, to.qos)
    end
    if mode == "requeue" then
        job_desc.requeue = 1
    end
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    route(job_desc)
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end
