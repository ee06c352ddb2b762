/* A stand-in for libnvidia-ml.so.1 whose GPUs are in use. It knows only what the file $BUSY_GPUS says whenever it is
 * asked: one GPU a line, `uuid percent MiB pid:MiB ...`. The
 * model is told by the first letter after `GPU-`. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_FOUND = 6, TOO_SMALL = 7, MAX_GPUS = 8, MAX_HELD = 8 };

struct held { unsigned pid; unsigned long long memory; unsigned gi, ci; };
struct gpu { char uuid[64]; unsigned use; unsigned long long mib; struct held held[MAX_HELD]; unsigned n; };
struct memory { unsigned long long total, free, used; };
struct use { unsigned gpu, memory; };
struct pci { char old_bus_id[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; };

static struct gpu gpus[MAX_GPUS];
static unsigned gpu_count;

static void read_gpus(void)
{
    FILE *file = fopen(getenv("BUSY_GPUS"), "r");
    char line[512];

    for (gpu_count = 0; file != NULL && gpu_count < MAX_GPUS && fgets(line, sizeof line, file); gpu_count++) {
        struct gpu *gpu = &gpus[gpu_count];
        int at = 0, size = 0;

        gpu->n = 0;
        if (sscanf(line, "%63s %u %llu%n", gpu->uuid, &gpu->use, &gpu->mib, &at) != 3)
            break;
        while (gpu->n < MAX_HELD
               && sscanf(line + at, " %u:%llu%n", &gpu->held[gpu->n].pid, &gpu->held[gpu->n].memory, &size) == 2) {
            gpu->held[gpu->n++].memory <<= 20;
            at += size;
        }
    }
    if (file != NULL)
        (void)fclose(file);
}

#define NVML(name, ...) \
    int name(__VA_ARGS__); \
    int name(__VA_ARGS__)

NVML(nvmlInitWithFlags, unsigned flags) { (void)flags; read_gpus(); return OK; }
NVML(nvmlShutdown, void) { return OK; }
NVML(nvmlDeviceGetCount_v2, unsigned *ret_count) { *ret_count = gpu_count; return OK; }
NVML(nvmlDeviceGetHandleByIndex_v2, unsigned index, struct gpu **ret_gpu) { *ret_gpu = &gpus[index]; return OK; }

NVML(nvmlDeviceGetUUID, const struct gpu *gpu, char *ret_text, unsigned size)
{
    (void)snprintf(ret_text, size, "%s", gpu->uuid);
    return OK;
}

NVML(nvmlDeviceGetHandleByUUID, const char *uuid, struct gpu **ret_gpu)
{
    for (unsigned i = 0; i < gpu_count; i++) {
        *ret_gpu = &gpus[i];
        if (strcmp(gpus[i].uuid, uuid) == 0)
            return OK;
    }
    return NOT_FOUND;
}

NVML(nvmlDeviceGetName, const struct gpu *gpu, char *ret_text, unsigned size)
{
    (void)snprintf(ret_text, size, "NVIDIA %c", gpu->uuid[strlen("GPU-")]);
    return OK;
}

NVML(nvmlDeviceGetPciInfo_v3, const struct gpu *gpu, struct pci *ret_pci)
{
    *ret_pci = (struct pci){.bus = (unsigned)(gpu - gpus)};
    (void)snprintf(ret_pci->bus_id, sizeof ret_pci->bus_id, "00000000:%02X:00.0", ret_pci->bus);
    return OK;
}

NVML(nvmlDeviceGetMemoryInfo, const struct gpu *gpu, struct memory *ret_memory)
{
    read_gpus();
    *ret_memory = (struct memory){.total = 80ull << 30, .used = gpu->mib << 20};
    return OK;
}

NVML(nvmlDeviceGetUtilizationRates, const struct gpu *gpu, struct use *ret_use)
{
    read_gpus();
    *ret_use = (struct use){.gpu = gpu->use};
    return OK;
}

NVML(nvmlDeviceGetComputeRunningProcesses_v3, const struct gpu *gpu, unsigned *count, struct held *ret_held)
{
    unsigned room = *count;

    *count = gpu->n;
    if (gpu->n == 0)
        return OK;
    if (ret_held == NULL || room < gpu->n)
        return TOO_SMALL;
    memcpy(ret_held, gpu->held, gpu->n * sizeof *ret_held);
    return OK;
}
