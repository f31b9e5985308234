/* A driver library with two devices: the functions of NVML that the monitor calls. The second device is lost.
   FAKE_NVML_EVENTS=lost: the driver has no more events, as after a device has fallen off the bus; unnamed: an event is that of a lost
   device. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void *Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { Device device; unsigned long long type, data; unsigned int gpu_instance, compute_instance; } Event;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, IS_LOST = 15 };
static char devices[2];
static int num_events;
static int events_are(const char *word) {
    const char *events = getenv("FAKE_NVML_EVENTS");
    return events && !strcmp(events, word);
}
static int index_of(Device device) { return (char *)device - devices; }
#define ALIVE(device) if (index_of(device) == 1) return IS_LOST

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned int flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device) { *device = devices + index; return SUCCESS; }
int nvmlDeviceGetUUID(Device device, char *uuid, unsigned int size) {
    if (events_are("unnamed") && num_events)
        return IS_LOST;
    strncpy(uuid, index_of(device) ? "GPU-b" : "GPU-a", size);
    return SUCCESS;
}
int nvmlSystemGetDriverVersion(char *version, unsigned int size) { strncpy(version, "580.1", size); return SUCCESS; }
int nvmlDeviceGetName(Device device, char *name, unsigned int size) { strncpy(name, "Fake", size); return SUCCESS; }
int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    ALIVE(device);
    *memory = (Memory){1000, 400, 600};
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(Device device, unsigned int *mw) { ALIVE(device); *mw = 250500; return SUCCESS; }
int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *mj) { *mj = 1234500; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned int *mw) { return NOT_SUPPORTED; }
int nvmlDeviceGetClockInfo(Device device, unsigned int type, unsigned int *mhz) { *mhz = type == 1 ? 1410 : 2619; return SUCCESS; }
int nvmlDeviceGetMaxClockInfo(Device device, unsigned int type, unsigned int *mhz) { *mhz = 1980; return SUCCESS; }
int nvmlDeviceGetTemperature(Device device, unsigned int sensor, unsigned int *c) { *c = 71; return SUCCESS; }
int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *reasons) { *reasons = 0x1 | 0x4 | 0x40; return SUCCESS; }
int nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) { *rates = (Utilization){87, 40}; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(Device device, unsigned int kind, unsigned int counter, unsigned long long *count) {
    *count = kind ? 1 : 12;
    return SUCCESS;
}
int nvmlEventSetCreate(void **set) { *set = devices; return SUCCESS; }
int nvmlDeviceRegisterEvents(Device device, unsigned long long types, void *set) {
    return index_of(device) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlEventSetWait_v2(void *set, Event *event, unsigned int timeout_ms) {
    if (num_events++)
        return TIMEOUT;
    if (events_are("lost"))
        return IS_LOST;
    *event = (Event){devices, 8, 79, -1u, -1u};
    return SUCCESS;
}
const char *nvmlErrorString(int error) { return "an error"; }
