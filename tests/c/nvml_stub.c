/* A stand-in for libnvidia-ml.so.1 that the real pynvml loads. The rule: it knows only what its environment says.
 *
 * NVML_STUB_GPUS   one board a line: uuid|product|MiB or -|mig|code
 *                  mig: - (cannot), off, or on: and its instances uuid;gi;ci;MiB joined by commas (none: a gap)
 *                  code: what asking for its handle returns, 0 if left out
 * NVML_STUB_CUDA   the driver's CUDA version (12080)
 * NVML_STUB_HELD   who has memory, one a line: uuid|pid|MiB or -; pid 0: memory in use of a process that is not listed
 * NVML_STUB_FAIL   function=code ...: what these return instead of working
 * NVML_STUB_LOG    a file that gets one line per init and shutdown
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, MAX_GPUS = 64, MAX_MIG = 8 };

struct unit {
    char *uuid, *product, *memory, *mig;
    int code;
    unsigned index, gi, ci, mig_count;
    struct unit *instances;
};

static struct unit gpus[MAX_GPUS], instances[MAX_GPUS][MAX_MIG];
static unsigned gpu_count;

/* Every entry point: declared, then defined, and first asked whether it is to fail. */
#define NVML(name, ...) \
    int name(__VA_ARGS__); \
    int name(__VA_ARGS__)
#define MAY_FAIL \
    do { \
        int code = failure(__func__); \
        if (code != OK) \
            return code; \
    } while (0)

static int failure(const char *function)
{
    const char *list = getenv("NVML_STUB_FAIL");
    size_t length = strlen(function);

    for (const char *at = list; at != NULL; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (strncmp(at, function, length) == 0 && at[length] == '=')
            return atoi(at + length + 1);
    }
    return OK;
}

static void note(const char *line)
{
    const char *path = getenv("NVML_STUB_LOG");
    FILE *log = path != NULL ? fopen(path, "a") : NULL;

    if (log != NULL) {
        (void)fprintf(log, "%s\n", line);
        (void)fclose(log);
    }
}

static char *field(char **rest, const char *separator)
{
    char *found = strsep(rest, separator);

    return found != NULL ? found : "";
}

static void read_instances(struct unit *gpu)
{
    char *rest = gpu->mig + strlen("on:");

    while (rest != NULL && *rest != '\0' && gpu->mig_count < MAX_MIG) {
        char *one = field(&rest, ",");
        struct unit *mig = &gpu->instances[gpu->mig_count++];

        mig->uuid = field(&one, ";");
        mig->gi = (unsigned)atoi(field(&one, ";"));
        mig->ci = (unsigned)atoi(field(&one, ";"));
        mig->memory = field(&one, ";");
        mig->product = gpu->product;
    }
}

static void read_gpus(void)
{
    const char *given = getenv("NVML_STUB_GPUS");
    char *rest = strdup(given != NULL ? given : "");

    gpu_count = 0;
    memset(gpus, 0, sizeof gpus);
    while (rest != NULL && *rest != '\0' && gpu_count < MAX_GPUS) {
        char *line = field(&rest, "\n");
        struct unit *gpu = &gpus[gpu_count];

        gpu->index = gpu_count;
        gpu->instances = instances[gpu_count++];
        gpu->uuid = field(&line, "|");
        gpu->product = field(&line, "|");
        gpu->memory = field(&line, "|");
        gpu->mig = field(&line, "|");
        gpu->code = atoi(field(&line, "|"));
        if (strncmp(gpu->mig, "on:", 3) == 0)
            read_instances(gpu);
    }
}

NVML(nvmlInitWithFlags, unsigned flags)
{
    MAY_FAIL;
    (void)flags;
    read_gpus();
    note("init");
    return OK;
}

NVML(nvmlShutdown, void)
{
    note("shutdown");
    MAY_FAIL;
    return OK;
}

const char *nvmlErrorString(int code);
const char *nvmlErrorString(int code)
{
    (void)code;
    return "an error only this driver knows";
}

NVML(nvmlSystemGetCudaDriverVersion, int *ret_version)
{
    const char *version = getenv("NVML_STUB_CUDA");

    MAY_FAIL;
    *ret_version = atoi(version != NULL ? version : "12080");
    return OK;
}

NVML(nvmlDeviceGetCount_v2, unsigned *ret_count)
{
    MAY_FAIL;
    *ret_count = gpu_count;
    return OK;
}

NVML(nvmlDeviceGetHandleByIndex_v2, unsigned index, struct unit **ret_gpu)
{
    MAY_FAIL;
    if (index >= gpu_count)
        return INVALID;
    *ret_gpu = &gpus[index];
    return gpus[index].code;
}

NVML(nvmlDeviceGetMigMode, struct unit *gpu, unsigned *ret_current, unsigned *ret_pending)
{
    MAY_FAIL;
    if (strcmp(gpu->mig, "-") == 0)
        return NOT_SUPPORTED;
    *ret_current = *ret_pending = strncmp(gpu->mig, "on:", 3) == 0;
    return OK;
}

NVML(nvmlDeviceGetMaxMigDeviceCount, struct unit *gpu, unsigned *ret_count)
{
    MAY_FAIL;
    *ret_count = strncmp(gpu->mig, "on:", 3) == 0 ? MAX_MIG : 0;
    return OK;
}

NVML(nvmlDeviceGetMigDeviceHandleByIndex, struct unit *gpu, unsigned index, struct unit **ret_mig)
{
    MAY_FAIL;
    if (index >= gpu->mig_count || *gpu->instances[index].uuid == '\0')
        return NOT_FOUND;
    *ret_mig = &gpu->instances[index];
    return OK;
}

NVML(nvmlDeviceGetGpuInstanceId, struct unit *mig, unsigned *ret_id)
{
    MAY_FAIL;
    *ret_id = mig->gi;
    return OK;
}

NVML(nvmlDeviceGetComputeInstanceId, struct unit *mig, unsigned *ret_id)
{
    MAY_FAIL;
    *ret_id = mig->ci;
    return OK;
}

NVML(nvmlDeviceGetUUID, struct unit *unit, char *buffer, unsigned size)
{
    MAY_FAIL;
    (void)snprintf(buffer, size, "%s", unit->uuid);
    return OK;
}

NVML(nvmlDeviceGetName, struct unit *unit, char *buffer, unsigned size)
{
    MAY_FAIL;
    (void)snprintf(buffer, size, "%s", unit->product);
    return OK;
}

struct memory {
    unsigned long long total, free, used;
};

NVML(nvmlDeviceGetMemoryInfo, struct unit *unit, struct memory *ret_memory)
{
    MAY_FAIL;
    if (strcmp(unit->memory, "-") == 0)
        return NOT_SUPPORTED;
    memset(ret_memory, 0, sizeof *ret_memory);
    ret_memory->total = strtoull(unit->memory, NULL, 10) << 20;
    return OK;
}

struct pci {
    char old_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

NVML(nvmlDeviceGetPciInfo_v3, struct unit *gpu, struct pci *ret_pci)
{
    MAY_FAIL;
    memset(ret_pci, 0, sizeof *ret_pci);
    (void)snprintf(ret_pci->bus_id, sizeof ret_pci->bus_id, "00000000:%02X:00.0", 0x10 + gpu->index);
    return OK;
}

NVML(nvmlDeviceGetHandleByUUID, const char *uuid, struct unit **ret_unit)
{
    MAY_FAIL;
    for (unsigned i = 0; i < gpu_count; i++) {
        *ret_unit = &gpus[i];
        if (strcmp(gpus[i].uuid, uuid) == 0)
            return OK;
        for (unsigned k = 0; k < gpus[i].mig_count; k++) {
            *ret_unit = &gpus[i].instances[k];
            if (strcmp((*ret_unit)->uuid, uuid) == 0)
                return OK;
        }
    }
    return NOT_FOUND;
}

struct holder {
    unsigned pid;
    unsigned long long bytes;
    unsigned gi, ci;
};

/* The lines of NVML_STUB_HELD that are about one unit: all its processes, and what they have in sum. */
static unsigned holders_of(const struct unit *unit, struct holder *ret_holders, unsigned size, unsigned long long *ret_sum)
{
    const char *given = getenv("NVML_STUB_HELD");
    char *all = strdup(given != NULL ? given : ""), *rest = all;
    unsigned count = 0;

    *ret_sum = 0;
    while (rest != NULL && *rest != '\0') {
        char *line = field(&rest, "\n");
        const char *uuid = field(&line, "|");
        unsigned pid = (unsigned)atoi(field(&line, "|"));
        const char *mib = field(&line, "|");
        unsigned long long bytes = *mib == '-' ? ~0ULL : strtoull(mib, NULL, 10) << 20;

        if (strcmp(uuid, unit->uuid) != 0)
            continue;
        *ret_sum += *mib == '-' ? 0 : bytes;
        if (pid == 0)
            continue;
        if (count < size)
            ret_holders[count] = (struct holder){.pid = pid, .bytes = bytes};
        count++;
    }
    free(all);
    return count;
}

static int running(const struct unit *unit, unsigned *count, struct holder *ret_holders)
{
    unsigned room = ret_holders != NULL ? *count : 0;
    unsigned long long sum;

    *count = holders_of(unit, ret_holders, room, &sum);
    return *count > room ? INSUFFICIENT_SIZE : OK;
}

NVML(nvmlDeviceGetComputeRunningProcesses_v3, struct unit *unit, unsigned *count, struct holder *ret_holders)
{
    MAY_FAIL;
    return running(unit, count, ret_holders);
}

NVML(nvmlDeviceGetComputeRunningProcesses_v2, struct unit *unit, unsigned *count, struct holder *ret_holders)
{
    MAY_FAIL;
    return running(unit, count, ret_holders);
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

NVML(nvmlDeviceGetMemoryInfo_v2, struct unit *unit, struct memory_v2 *ret_memory)
{
    MAY_FAIL;
    (void)holders_of(unit, NULL, 0, &ret_memory->used);
    return OK;
}
