// Streams, each a queue with a thread, and events. Kernels of torch are known by name and not executed.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "machine.h"

namespace sim {
namespace {

std::atomic<long> delay_us{-1};
std::atomic<bool> is_exiting{false};
std::atomic<int> num_running{0};

class Stream {
 public:
  explicit Stream(int device) : device_(device) {}

  void push(std::function<void()> work) {
    std::lock_guard<std::mutex> guard(lock_);
    queue_.push_back(std::move(work));
    pushed_++;
    if (!has_thread_) std::thread([this] { run(); }).detach();
    has_thread_ = true;
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [this, until = pushed_] { return done_ >= until; });
  }
  bool is_idle() {
    std::lock_guard<std::mutex> guard(lock_);
    return done_ == pushed_;
  }
  int device() const { return device_; }

 private:
  void run() {
    pthread_setname_np(pthread_self(), "simulated-gpu");
    set_stream_thread(device_);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> guard(lock_);
        changed_.wait(guard, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      num_running++;
      if (is_exiting) {
        num_running--;
        return;
      }
      if (delay_us < 0) delay_us = setting("SIMULATED_GPU_DELAY_US", 0);
      if (delay_us) usleep(delay_us);
      work();
      work = nullptr;
      num_running--;
      std::lock_guard<std::mutex> guard(lock_);
      done_++;
      changed_.notify_all();
    }
  }

  const int device_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t pushed_ = 0, done_ = 0;
  bool has_thread_ = false;
};

std::mutex streams_lock;
std::vector<Stream*>* streams = new std::vector<Stream*>;
Stream* default_streams[kMostDevices];

// A process that ends leaves its queues alone, as on a GPU; what runs just now may end first.
void leave() {
  is_exiting = true;
  for (int i = 0; i < 100 && num_running; i++) usleep(1000);
}

Stream* add_stream(int device) {
  static std::once_flag once;
  std::call_once(once, [] { atexit(leave); });
  streams->push_back(new Stream(device));
  return streams->back();
}

Stream* stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return reinterpret_cast<Stream*>(handle);
  std::lock_guard<std::mutex> guard(streams_lock);
  Stream*& found = default_streams[current_device()];
  if (!found) found = add_stream(current_device());
  return found;
}

cudaError_t synchronize(Stream* stream) {
  stream->synchronize();
  const cudaError_t error = device_error(stream->device());
  return error ? fail(error) : cudaSuccess;
}

}  // namespace

void enqueue(cudaStream_t handle, std::function<void()> work) {
  Stream* stream = stream_of(handle);
  stream->push([stream, work = std::move(work)] {
    if (!device_error(stream->device())) work();  // nothing runs on a broken device any more
  });
}

void synchronize_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> guard(streams_lock);
    for (Stream* stream : *streams)
      if (stream->device() == device) all.push_back(stream);
  }
  for (Stream* stream : all) stream->synchronize();
}

}  // namespace sim

using namespace sim;
using Clock = std::chrono::steady_clock;

API void simulated_gpu_set_delay_us(long us) { delay_us = us; }
API void simulated_gpu_enqueue(void* stream, std::function<void()>* work) {
  enqueue(static_cast<cudaStream_t>(stream), std::move(*work));
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int) {
  if (cudaError_t error = enter("cudaStreamCreate")) return error;
  std::lock_guard<std::mutex> guard(streams_lock);
  *handle = reinterpret_cast<cudaStream_t>(add_stream(current_device()));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (cudaError_t error = enter("cudaStreamSynchronize")) return error;
  return synchronize(stream_of(handle));
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  if (cudaError_t error = device_error(stream->device())) return fail(error);
  return stream->is_idle() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaDeviceSynchronize() {
  if (cudaError_t error = enter("cudaDeviceSynchronize")) return error;
  synchronize_device(current_device());
  const cudaError_t error = device_error(current_device());
  return error ? fail(error) : cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  enqueue(handle, [=] { function(data); });
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* num) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (num) *num = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- events

namespace {
struct Mark {
  std::mutex lock;
  std::condition_variable changed;
  bool is_done = false;
  Clock::time_point at;
};
struct Event {
  std::mutex lock;
  std::shared_ptr<Mark> mark;  // of the last record
  int device;
};
std::shared_ptr<Mark> mark_of(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  std::lock_guard<std::mutex> guard(event->lock);
  return event->mark;
}
void wait_for(const std::shared_ptr<Mark>& mark) {
  if (!mark) return;
  std::unique_lock<std::mutex> guard(mark->lock);
  mark->changed.wait(guard, [&] { return mark->is_done; });
}
}  // namespace

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  if (cudaError_t error = enter("cudaEventCreate")) return error;
  auto* event = new Event;
  event->device = current_device();
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete reinterpret_cast<Event*>(handle);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  if (stream->device() != event->device) return fail(cudaErrorInvalidResourceHandle);
  auto mark = std::make_shared<Mark>();
  {
    std::lock_guard<std::mutex> guard(event->lock);
    event->mark = mark;
  }
  stream->push([mark] {
    std::lock_guard<std::mutex> guard(mark->lock);
    mark->is_done = true;
    mark->at = Clock::now();
    mark->changed.notify_all();
  });
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto mark = mark_of(event)) stream_of(stream)->push([mark] { wait_for(mark); });
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (cudaError_t error = device_error(reinterpret_cast<Event*>(handle)->device)) return fail(error);
  auto mark = mark_of(handle);
  if (!mark) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mark->lock);
  return mark->is_done ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  wait_for(mark_of(handle));
  const cudaError_t error = device_error(reinterpret_cast<Event*>(handle)->device);
  return error ? fail(error) : cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  auto first = mark_of(begin), last = mark_of(end);
  if (!first || !last) return fail(cudaErrorInvalidResourceHandle);
  if (!first->is_done || !last->is_done) return cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(last->at - first->at).count();
  return cudaSuccess;
}

// ---- kernels: one that no operator replaces names itself

namespace {
std::map<const void*, std::string>& kernel_names() {
  static auto* names = new std::map<const void*, std::string>;
  return *names;
}
struct Launch {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Launch> launches;
cudaError_t refuse(const void* function) {
  if (cudaError_t error = enter("a kernel")) return error;
  auto found = kernel_names().find(function);
  const std::string name = found == kernel_names().end() ? "without a name" : found->second.substr(0, 300);
  fprintf(stderr, "simulated GPU: no operator stands for the kernel %s\n", name.c_str());
  log_event("kernel", "\"name\": \"" + name + "\"");
  return fail(cudaErrorNotSupported);
}
}  // namespace

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernel_names()[host] = name;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  launches.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Launch launch = launches.back();
  launches.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.shared;
  *static_cast<void**>(stream) = launch.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(function); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return refuse(function); }
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(kernel); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  cudaFuncAttributes found;
  memset(&found, 0, sizeof found);
  found.maxThreadsPerBlock = 1024;
  found.binaryVersion = found.ptxVersion = 90;
  *attributes = found;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num, const void*, int, size_t, unsigned) {
  *num = 2;
  return cudaSuccess;
}
