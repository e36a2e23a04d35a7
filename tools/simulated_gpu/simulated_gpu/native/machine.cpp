// Devices of the machine: visibility, current device, primary contexts, errors, the event log.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "machine.h"

namespace sim {
namespace {

thread_local int t_device = 0;
thread_local cudaError_t t_last_error = cudaSuccess;
std::atomic<unsigned> contexts{0};
std::atomic<int> broken[kMostDevices];
std::atomic<bool> is_forked_copy{false}, is_initialized{false};
std::mutex context_lock;

std::string read_visible() {
  const char* value = getenv("CUDA_VISIBLE_DEVICES");
  if (value) return value;
  std::string all;
  for (long i = 0; i < setting("SIMULATED_GPU_COUNT", 2); i++) all += (i ? "," : "") + std::to_string(i);
  return all;
}

// The driver reads CUDA_VISIBLE_DEVICES once in a process. It stops at the first invalid entry.
const std::vector<int>& visible() {
  static const auto* numbers = [] {
    auto* found = new std::vector<int>;
    is_initialized = true;
    const long most = setting("SIMULATED_GPU_COUNT", 2);
    std::string rest = read_visible();
    log_event("init", "\"visible\": \"" + rest + "\"");
    while (!rest.empty()) {
      const size_t comma = rest.find(',');
      std::string entry = rest.substr(0, comma);
      rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
      for (const char* prefix : {"GPU-", "MIG-"})
        if (entry.rfind(prefix, 0) == 0) entry = entry.substr(strlen(prefix));
      char* end = nullptr;
      const long number = strtol(entry.c_str(), &end, 10);
      if (end == entry.c_str() || number < 0 || number >= most) break;
      found->push_back(int(number));
      if (setting("SIMULATED_GPU_MIG", 0)) break;  // CUDA shows one slice a process
    }
    return found;
  }();
  return *numbers;
}

// EXCLUSIVE_PROCESS: the first process with a context holds the device until it ends.
bool hold_exclusively(int device) {
  if (!setting("SIMULATED_GPU_EXCLUSIVE", 0)) return true;
  const std::string path = text_setting("SIMULATED_GPU_DIR") + "/exclusive." + std::to_string(physical_device(device));
  const int file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  struct flock range {};
  range.l_type = F_WRLCK;
  if (file < 0 || fcntl(file, F_SETLK, &range) == 0) return true;
  close(file);
  return false;
}

cudaError_t make_context(int device, const char* call) {
  if (is_forked_copy) return fail(cudaErrorInitializationError);
  if (device >= num_devices()) return fail(cudaErrorNoDevice);
  if (cudaError_t error = device_error(device)) return fail(error);
  const unsigned bit = 1u << device;
  if (contexts & bit) return cudaSuccess;
  std::lock_guard<std::mutex> guard(context_lock);
  if (contexts & bit) return cudaSuccess;
  if (!hold_exclusively(device)) return fail(cudaErrorDevicesUnavailable);
  contexts |= bit;
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { is_forked_copy = true; }); });
  log_event("context", "\"device\": " + std::to_string(physical_device(device)) + ", \"call\": \"" + call + "\"");
  return cudaSuccess;
}

}  // namespace

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

std::string text_setting(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

void log_event(const std::string& name, const std::string& members) {
  const std::string directory = text_setting("SIMULATED_GPU_DIR");
  if (directory.empty()) return;
  char thread[32] = "";
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  const bool is_main = syscall(SYS_gettid) == getpid();
  const std::string line = "{\"event\": \"" + name + "\", \"host\": \"" + host_name() + "\", \"pid\": " + std::to_string(getpid()) + ", \"thread\": \"" +
                           (is_main ? "main" : thread) + "\"" + (members.empty() ? "" : ", " + members) + "}\n";
  const int file = open((directory + "/events").c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (write(file, line.data(), line.size()) < 0) perror("simulated GPU: its event log");
  close(file);
}

int num_devices() { return int(visible().size()); }
int physical_device(int device) { return visible()[device]; }
int current_device() { return t_device; }
void set_stream_thread(int device) { t_device = device; }
cudaError_t enter(const char* call) { return make_context(t_device, call); }
cudaError_t fail(cudaError_t error) { return t_last_error = error; }
cudaError_t device_error(int device) { return cudaError_t(broken[device].load()); }
void break_device(int device, cudaError_t error) {
  broken[device] = error;
  log_event("broken", "\"device\": " + std::to_string(device) + ", \"error\": " + std::to_string(error));
}

}  // namespace sim

using namespace sim;

API unsigned simulated_gpu_contexts() { return contexts; }
API void simulated_gpu_break(int device, int error) { break_device(device, cudaError_t(error)); }

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  t_device = device;
  return enter("cudaSetDevice");  // since CUDA 12 it makes the context
}
static size_t memory_bytes() { return size_t(setting("SIMULATED_GPU_MEMORY_MB", 2048)) << 20; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  cudaDeviceProp p;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "Simulated GPU");
  p.major = 9;
  p.totalGlobalMem = memory_bytes();
  p.multiProcessorCount = 132;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = 2048;
  p.regsPerMultiprocessor = 65536;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.textureAlignment = 512;
  p.unifiedAddressing = p.canMapHostMemory = 1;
  p.pciBusID = physical_device(device) + 1;
  *properties = p;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrWarpSize             ? 32
           : attribute == cudaDevAttrMultiProcessorCount  ? 132
                                                          : 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", physical_device(device) + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaGetLastError() {
  const cudaError_t error = t_last_error;
  if (!device_error(t_device)) t_last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return t_last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorDevicesUnavailable: return "cudaErrorDevicesUnavailable";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorECCUncorrectable: return "cudaErrorECCUncorrectable";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    default: return "a CUDA error";
  }
}
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    default: return cudaGetErrorName(error);
  }
}

// ---- the driver, as far as torch calls it

API int cuInit(unsigned) { return num_devices() ? 0 : cudaErrorNoDevice; }
API int cuDeviceGetCount(int* count) {
  return is_initialized ? (*count = num_devices(), 0) : int(cudaErrorInitializationError);
}
API int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
API int cuDeviceGet(int* device, int number) { return *device = number, 0; }
API int cuDeviceGetAttribute(int* value, int, int) { return *value = 0, 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = contexts >> device & 1;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(1);
  return make_context(device, "cuDevicePrimaryCtxRetain");
}
API int cuCtxGetCurrent(void** context) {
  *context = contexts >> t_device & 1 ? reinterpret_cast<void*>(1) : nullptr;
  return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuGetErrorString(int error, const char** text) { return *text = cudaGetErrorString(cudaError_t(error)), 0; }
API int cuPointerGetAttribute(void* value, int, unsigned long long) {
  *static_cast<void**>(value) = reinterpret_cast<void*>(1);
  return 0;
}
static int not_supported() { return cudaErrorNotSupported; }
#define NOT_SUPPORTED(name) \
  API int name() { return not_supported(); }
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *entry = dlsym(RTLD_DEFAULT, name);
  if (!*entry) *entry = reinterpret_cast<void*>(not_supported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
