/* A CUDA driver library without a GPU: the driver API with results from the environment, so that the
 * real ctypes calls run. Two GPUs of different names; STUB_ATTRIBUTES is `18=1,83=0`, others are 7. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) {
    if (number("STUB_HANGS", 0))
        for (;;)
            pause();
    if (number("STUB_CRASHES", 0))
        raise(SIGSEGV);
    return number("STUB_INIT", 0) + (int)flags;
}

int cuDriverGetVersion(int *out) {
    *out = 13020;
    return 0;
}

int cuDeviceGetCount(int *out) {
    *out = number("STUB_COUNT", 2);
    return 0;
}

int cuDeviceGet(int *out, int index) {
    *out = 40 + index;
    return index == number("STUB_LOST", -1) ? 101 : 0;
}

int cuDeviceGetName(char *out, int bytes, int device) {
    snprintf(out, bytes, "Stub %d", device - 40);
    return 0;
}

#ifdef OLD_DRIVER
int cuDeviceGetUuid(unsigned char *out, int device) {
#else
int cuDeviceGetUuid_v2(unsigned char *out, int device) {
#endif
    for (int i = 0; i < 16; i++)
        out[i] = (unsigned char)(16 * (device - 40) + i);
    return 0;
}

int cuDeviceGetPCIBusId(char *out, int bytes, int device) {
    snprintf(out, bytes, "0000:%02X:00.0", 0x3b + device - 40);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *out, int device) {
    *out = (size_t)100 << (30 + device - 40);
    return 0;
}

int cuDeviceGetAttribute(int *out, int attribute, int device) {
    char key[32];
    const char *list = getenv("STUB_ATTRIBUTES");
    (void)device;
    if (attribute == number("STUB_NO_ATTRIBUTE", -1))
        return 1;
    snprintf(key, sizeof key, ",%d=", attribute);
    const char *found = list ? strstr(list, key) : NULL;
    *out = found ? atoi(found + strlen(key)) : 7;
    return 0;
}

int cuGetErrorName(int code, const char **out) {
    *out = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
         : code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : NULL;
    return *out == NULL;
}
