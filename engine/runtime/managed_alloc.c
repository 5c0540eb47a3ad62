/* Managed (unified) memory behind torch's caching allocator.
 *
 * torch allocates segments of a few MiB or more with managed_alloc, places tensors in them, and frees
 * them with managed_free. Both use the driver library, libcuda, found at run time: neither a CUDA
 * toolkit nor libcudart is needed to build or load this file.
 *
 * The one rule: never allocate more managed memory than is free. The driver itself
 * refuses nothing: it promises more pages than exist, and on a machine whose GPU shares the
 * host's memory the whole host then hangs. So each request is compared with what is free now, less
 * a reserve, and with a limit on everything held here. A refused request returns NULL, is counted
 * and sets managed_last_error; nothing is requested from the driver.
 *
 *   discrete GPU     free memory is cuMemGetInfo's.
 *   integrated GPU   free memory is MemAvailable of /proc/meminfo. cuMemGetInfo gives MemFree there,
 *                    which counts the page cache as used.
 *
 * Pages of managed memory are allocated at the first touch, so the free memory would not fall with an
 * allocation. Each segment is therefore prefetched to the device before it is returned, so that the
 * free memory is up to date. A driver that cannot migrate pages (no concurrent access) allocates them
 * all at once.
 *
 * Not covered: cgroup limits, which do not see CUDA memory. Not for use while a
 * stream is captured.
 */

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;
typedef void *CUstream;
typedef unsigned long long CUdeviceptr;

/* Constants of cuda.h: part of the driver's ABI. */
enum {
    DEINITIALIZED = 4,
    ATTRIBUTE_INTEGRATED = 18,
    ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
    ATTACH_GLOBAL = 1,
    ADVISE_PREFERRED_LOCATION = 3,
};
enum { DEVICES = 64, TEXT_BYTES = 512 };

static struct {
    CUresult (*init)(unsigned);
    CUresult (*error_name)(CUresult, const char **);
    CUresult (*device_get)(CUdevice *, int);
    CUresult (*attribute)(int *, int, CUdevice);
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*push)(CUcontext);
    CUresult (*pop)(CUcontext *);
    CUresult (*synchronize)(void);
    CUresult (*wait_stream)(CUstream);
    CUresult (*mem_info)(size_t *, size_t *);
    CUresult (*alloc)(CUdeviceptr *, size_t, unsigned);
    CUresult (*free)(CUdeviceptr);
    CUresult (*advise)(CUdeviceptr, size_t, int, CUdevice);
    CUresult (*prefetch)(CUdeviceptr, size_t, CUdevice, CUstream);
} cu;

/* In the order of the fields above. A name without _v2 is the first version of its function. */
static const char *const SYMBOLS[] = {
    "cuInit",           "cuGetErrorName",       "cuDeviceGet",
    "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2", "cuCtxSynchronize",   "cuStreamSynchronize",
    "cuMemGetInfo_v2",  "cuMemAllocManaged",    "cuMemFree_v2",
    "cuMemAdvise",      "cuMemPrefetchAsync",
};
enum { SYMBOL_COUNT = sizeof SYMBOLS / sizeof *SYMBOLS };
_Static_assert(sizeof cu == SYMBOL_COUNT * sizeof(void *), "one symbol for each field");

struct managed_stats {
    uint64_t held_bytes;  /* held now, in segments */
    uint64_t peak_bytes;  /* most ever held */
    uint64_t asked;       /* allocations requested from the driver */
    uint64_t refused;     /* requests refused, here or by the driver */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int is_open;
static char meminfo_path[TEXT_BYTES];
static CUcontext contexts[DEVICES];
static uint64_t limit_bytes = UINT64_MAX, reserve_bytes;
static struct managed_stats stats;
static char last_error[TEXT_BYTES];

static void say(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vsnprintf(last_error, sizeof last_error, format, rest);
    va_end(rest);
}

static int failed(const char *call, CUresult result) {
    const char *name = NULL;
    if (result == 0)
        return 0;
    if (cu.error_name(result, &name) != 0 || name == NULL)
        name = "an unknown error";
    say("%s: expected success, found %s (%d)", call, name, result);
    return 1;
}

/* Loads the driver; 0, or -1 with managed_last_error. A second call does nothing. */
int managed_open(const char *driver, const char *meminfo) {
    int result = -1;
    pthread_mutex_lock(&mutex);
    if (is_open) {
        result = 0;
        goto done;
    }
    void *library = dlopen(driver, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        say("%s", dlerror());
        goto done;
    }
    for (int i = 0; i < SYMBOL_COUNT; i++) {
        void *symbol = dlsym(library, SYMBOLS[i]);
        if (symbol == NULL) {
            say("%s: expected the function %s, found none", driver, SYMBOLS[i]);
            goto done;
        }
        memcpy((char *)&cu + i * sizeof(void *), &symbol, sizeof symbol);
    }
    if (failed("cuInit", cu.init(0)))
        goto done;
    snprintf(meminfo_path, sizeof meminfo_path, "%s", meminfo);
    is_open = 1;
    result = 0;
done:
    pthread_mutex_unlock(&mutex);
    return result;
}

/* `limit` bounds the bytes held at once; `reserve` bytes of the free memory are never taken. */
void managed_limits(uint64_t limit, uint64_t reserve) {
    pthread_mutex_lock(&mutex);
    limit_bytes = limit;
    reserve_bytes = reserve;
    pthread_mutex_unlock(&mutex);
}

void managed_read_stats(struct managed_stats *out) {
    pthread_mutex_lock(&mutex);
    *out = stats;
    pthread_mutex_unlock(&mutex);
}

void managed_last_error(char *out, size_t bytes) {
    pthread_mutex_lock(&mutex);
    snprintf(out, bytes, "%s", last_error);
    pthread_mutex_unlock(&mutex);
}

static int read_available(uint64_t *bytes) {
    char line[256];
    unsigned long long kib;
    FILE *file = fopen(meminfo_path, "r");
    if (file == NULL) {
        say("%s: expected a file to read, found none", meminfo_path);
        return -1;
    }
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) {
            fclose(file);
            *bytes = kib * 1024;
            return 0;
        }
    fclose(file);
    say("%s: expected a line MemAvailable, found none", meminfo_path);
    return -1;
}

/* Makes the primary context current, the one torch uses. 0, or -1 with last_error. */
static int enter(int ordinal, CUdevice *device) {
    if (ordinal < 0 || ordinal >= DEVICES) {
        say("device: expected an ordinal below %d, found %d", DEVICES, ordinal);
        return -1;
    }
    if (failed("cuDeviceGet", cu.device_get(device, ordinal)))
        return -1;
    if (contexts[ordinal] == NULL
        && failed("cuDevicePrimaryCtxRetain", cu.retain(&contexts[ordinal], *device))) {
        contexts[ordinal] = NULL;
        return -1;
    }
    return failed("cuCtxPushCurrent", cu.push(contexts[ordinal])) ? -1 : 0;
}

static void leave(void) {
    CUcontext popped;
    cu.pop(&popped);
}

/* Returns a segment whose pages are on the device, or NULL with last_error. */
static void *take(size_t size, CUdevice device, CUstream stream) {
    int integrated = 0, concurrent = 0;
    if (failed("cuDeviceGetAttribute", cu.attribute(&integrated, ATTRIBUTE_INTEGRATED, device))
        || failed("cuDeviceGetAttribute",
                  cu.attribute(&concurrent, ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, device)))
        return NULL;
    uint64_t available;
    const char *source = integrated ? meminfo_path : "cuMemGetInfo";
    if (integrated) {
        if (read_available(&available) != 0)
            return NULL;
    } else {
        size_t free_now, total;
        if (failed("cuMemGetInfo", cu.mem_info(&free_now, &total)))
            return NULL;
        available = free_now;
    }
    uint64_t usable = available > reserve_bytes ? available - reserve_bytes : 0;
    if (size > usable) {
        say("expected at most %llu bytes (%s says %llu are free, %llu stay in reserve), found a "
            "request for %llu",
            (unsigned long long)usable, source, (unsigned long long)available,
            (unsigned long long)reserve_bytes, (unsigned long long)size);
        return NULL;
    }
    if (stats.held_bytes > limit_bytes || size > limit_bytes - stats.held_bytes) {
        say("expected at most %llu bytes in all, found %llu held and a request for %llu",
            (unsigned long long)limit_bytes, (unsigned long long)stats.held_bytes,
            (unsigned long long)size);
        return NULL;
    }
    CUdeviceptr pointer = 0;
    stats.asked++;
    if (failed("cuMemAllocManaged", cu.alloc(&pointer, size, ATTACH_GLOBAL)))
        return NULL;
    if (concurrent
        && (failed("cuMemAdvise", cu.advise(pointer, size, ADVISE_PREFERRED_LOCATION, device))
            || failed("cuMemPrefetchAsync", cu.prefetch(pointer, size, device, stream))
            || failed("cuStreamSynchronize", cu.wait_stream(stream)))) {
        cu.free(pointer);
        return NULL;
    }
    return (void *)(uintptr_t)pointer;
}

/* The signature that torch.cuda.memory.CUDAPluggableAllocator calls. torch treats NULL as out of memory. */
void *managed_alloc(ssize_t size, int ordinal, CUstream stream) {
    void *pointer = NULL;
    CUdevice device;
    pthread_mutex_lock(&mutex);
    if (!is_open)
        say("managed_alloc: expected managed_open first, found no driver");
    else if (size <= 0)
        say("managed_alloc: expected a size above 0, found %lld", (long long)size);
    else if (enter(ordinal, &device) == 0) {
        pointer = take((size_t)size, device, stream);
        leave();
    }
    if (pointer == NULL)
        stats.refused++;
    else {
        stats.held_bytes += (uint64_t)size;
        if (stats.held_bytes > stats.peak_bytes)
            stats.peak_bytes = stats.held_bytes;
    }
    pthread_mutex_unlock(&mutex);
    return pointer;
}

void managed_free(void *pointer, ssize_t size, int ordinal, CUstream stream) {
    CUdevice device;
    (void)stream; /* work on any stream may still read the segment, so all streams are waited for */
    if (pointer == NULL)
        return;
    pthread_mutex_lock(&mutex);
    if (enter(ordinal, &device) == 0) {
        CUresult result = cu.synchronize();
        if (result == 0)
            result = cu.free((CUdeviceptr)(uintptr_t)pointer);
        /* At process exit the driver may already be unloaded, and the memory freed with it. */
        if (result == DEINITIALIZED || !failed("cuMemFree", result))
            stats.held_bytes -= (uint64_t)size;
        leave();
    }
    pthread_mutex_unlock(&mutex);
}
