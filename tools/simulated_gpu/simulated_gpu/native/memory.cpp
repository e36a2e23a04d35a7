// Memory of the devices, pinned memory of the host, and copies between them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "machine.h"

namespace sim {
namespace {

constexpr size_t kRegion = size_t(16) << 30;  // addresses of each device
constexpr size_t kGrain = 512;

struct Block {
  size_t size;
  int device;
};
struct Device {
  std::multimap<size_t, char*> free_blocks;
  size_t top = 0, used = 0;
};

std::mutex lock;
char *device_pages = nullptr, *host_pages = nullptr;
int memory_file = -1;
Device devices[kMostDevices];
std::map<char*, Block>* blocks = new std::map<char*, Block>;
std::map<char*, size_t>* pinned = new std::map<char*, size_t>;
size_t pinned_bytes = 0;

void map_regions() {
  static std::once_flag once;
  std::call_once(once, [] {
    const size_t total = kRegion * num_devices();
    memory_file = memfd_create("simulated_gpu", MFD_CLOEXEC);
    if (ftruncate(memory_file, total)) abort();
    const int flags = MAP_SHARED | MAP_NORESERVE;
    host_pages = static_cast<char*>(mmap(nullptr, total, PROT_READ | PROT_WRITE, flags, memory_file, 0));
    device_pages = static_cast<char*>(mmap(nullptr, total, PROT_NONE, flags, memory_file, 0));
    if (device_pages == MAP_FAILED || host_pages == MAP_FAILED) abort();
  });
}

int device_of(const void* pointer) { return int((static_cast<const char*>(pointer) - device_pages) / kRegion); }
size_t memory_bytes() { return size_t(setting("SIMULATED_GPU_MEMORY_MB", 2048)) << 20; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = pinned->upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (found == pinned->begin()) return false;
  --found;
  return static_cast<const char*>(pointer) < found->first + found->second;
}

// Whether a range of the host lies in one pinned range, or outside of all: CUDA copies no other.
bool is_of_one_kind(const void* pointer, size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  char* begin = static_cast<char*>(const_cast<void*>(pointer));
  auto next = pinned->upper_bound(begin);
  if (next != pinned->begin()) {
    auto before = std::prev(next);
    char* end = before->first + before->second;
    if (begin < end) return begin + size <= end;
  }
  return next == pinned->end() || begin + size <= next->first;
}

cudaError_t pin(void* pointer, size_t size, const char* call) {
  const long limit_mb = setting("SIMULATED_GPU_PINNED_MB", -1);
  std::lock_guard<std::mutex> guard(lock);
  if (limit_mb >= 0 && pinned_bytes + size > size_t(limit_mb) << 20) return fail(cudaErrorMemoryAllocation);
  (*pinned)[static_cast<char*>(pointer)] = size;
  pinned_bytes += size;
  log_event("pinned", "\"bytes\": " + std::to_string(size) + ", \"call\": \"" + call +
                          "\", \"device\": " + std::to_string(physical_device(current_device())));
  return cudaSuccess;
}

bool unpin(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = pinned->find(static_cast<char*>(pointer));
  if (found == pinned->end()) return false;
  pinned_bytes -= found->second;
  pinned->erase(found);
  return true;
}

void transfer(char* to, const char* from, size_t size) {
  static const long rate = setting("SIMULATED_GPU_COPY_MB_S", 0);
  if (rate) usleep(size / rate);
  memcpy(to, from, size);
}

}  // namespace

char* host_view(const void* pointer) {
  char* bytes = static_cast<char*>(const_cast<void*>(pointer));
  return is_on_device(pointer) ? host_pages + (bytes - device_pages) : bytes;
}
bool is_on_device(const void* pointer) {
  const char* bytes = static_cast<const char*>(pointer);
  return device_pages && bytes >= device_pages && bytes < device_pages + kRegion * num_devices();
}

}  // namespace sim

using namespace sim;

API void* simulated_gpu_host_view(const void* pointer) { return host_view(pointer); }
API size_t simulated_gpu_pinned_bytes() { return pinned_bytes; }

API cudaError_t cudaMalloc(void** pointer, size_t size) {
  *pointer = nullptr;
  if (cudaError_t error = enter("cudaMalloc")) return error;
  map_regions();
  size = (size + kGrain - 1) / kGrain * kGrain;
  std::lock_guard<std::mutex> guard(lock);
  Device& device = devices[current_device()];
  if (device.used + size > memory_bytes()) return fail(cudaErrorMemoryAllocation);
  char* at;
  auto found = device.free_blocks.find(size);
  if (found != device.free_blocks.end()) {
    at = found->second;
    device.free_blocks.erase(found);
  } else if (device.top + size > kRegion) {
    return fail(cudaErrorMemoryAllocation);
  } else {
    at = device_pages + kRegion * current_device() + device.top;
    device.top += size;
  }
  (*blocks)[at] = {size, current_device()};
  device.used += size;
  *pointer = at;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
  if (cudaError_t error = enter("cudaFree")) return error;
  if (!pointer) return cudaSuccess;
  synchronize_device(device_of(pointer));  // as CUDA's
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks->find(static_cast<char*>(pointer));
  if (found == blocks->end()) return fail(cudaErrorInvalidValue);
  const Block block = found->second;
  fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, found->first - device_pages, block.size);
  devices[block.device].free_blocks.insert({block.size, found->first});
  devices[block.device].used -= block.size;
  blocks->erase(found);
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  if (cudaError_t error = enter("cudaMemGetInfo")) return error;
  std::lock_guard<std::mutex> guard(lock);
  *total = memory_bytes();
  *free_bytes = *total - devices[current_device()].used;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  *pointer = nullptr;
  if (cudaError_t error = enter("cudaHostAlloc")) return error;
  void* made = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  if (cudaError_t error = made ? pin(made, size, "cudaHostAlloc") : fail(cudaErrorMemoryAllocation)) {
    free(made);
    return error;
  }
  *pointer = made;
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  if (!unpin(pointer)) return fail(cudaErrorInvalidValue);
  free(pointer);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  if (cudaError_t error = enter("cudaHostRegister")) return error;
  static const long rate = setting("SIMULATED_GPU_PIN_MB_S", 0);
  if (rate) usleep(size / rate);
  if (is_pinned(pointer)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  return pin(pointer, size, "cudaHostRegister");
}
API cudaError_t cudaHostUnregister(void* pointer) {
  return unpin(pointer) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  cudaPointerAttributes found;
  memset(&found, 0, sizeof found);
  void* bytes = const_cast<void*>(pointer);
  if (is_on_device(pointer)) {
    found.type = cudaMemoryTypeDevice;
    found.device = device_of(pointer);
    found.devicePointer = bytes;
  } else if (is_pinned(pointer)) {
    found.type = cudaMemoryTypeHost;
    found.device = current_device();
    found.devicePointer = found.hostPointer = bytes;
  } else {
    found.type = cudaMemoryTypeUnregistered;
    found.device = -1;
  }
  *attributes = found;
  return cudaSuccess;
}

// ---- copies, by CUDA's rules: pageable memory is read before a call returns, and written when it returns

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  if (cudaError_t error = enter("cudaMemcpyAsync")) return error;
  char *target = host_view(to), *source = host_view(from);
  const bool reads_host = !is_on_device(from), writes_host = !is_on_device(to);
  if ((reads_host && !is_of_one_kind(from, size)) || (writes_host && !is_of_one_kind(to, size)))
    return fail(cudaErrorInvalidValue);
  if (reads_host && !writes_host && !is_pinned(from)) {
    auto staged = std::make_shared<std::vector<char>>(source, source + size);
    enqueue(stream, [=] { transfer(target, staged->data(), size); });
    return cudaSuccess;
  }
  enqueue(stream, [=] { transfer(target, source, size); });
  return writes_host && !is_pinned(to) ? cudaStreamSynchronize(stream) : cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, size, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  if (cudaError_t error = enter("cudaMemsetAsync")) return error;
  char* target = host_view(pointer);
  enqueue(stream, [=] { memset(target, value, size); });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t size) { return cudaMemsetAsync(pointer, value, size, nullptr); }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
