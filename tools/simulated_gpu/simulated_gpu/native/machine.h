// What the parts of the simulated GPU share. A process of a test preloads all of them as one library.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace sim {

constexpr int kMostDevices = 16;

// Settings are environment variables (see __init__.py); they are read at first use.
long setting(const char* name, long otherwise);
std::string text_setting(const char* name);

std::string host_name();

// Append one JSON line to the event log: its name, and further members such as `"device": 1`.
void log_event(const std::string& name, const std::string& members);

int num_devices();
int physical_device(int device);  // number on the machine, by CUDA_VISIBLE_DEVICES
int current_device();
void set_stream_thread(int device);

// Each call of CUDA that needs a context starts with `enter`: it makes the primary context of the
// current device, or returns the error that the device or the process has by now.
cudaError_t enter(const char* call);
cudaError_t fail(cudaError_t error);  // records the thread's last error
cudaError_t device_error(int device);
void break_device(int device, cudaError_t error);  // sticky

// Device addresses cannot be touched by the host: the same pages are mapped a second time for the
// simulator. `host_view` returns that view, or the pointer itself if it is the host's.
char* host_view(const void* pointer);
bool is_on_device(const void* pointer);

void enqueue(cudaStream_t stream, std::function<void()> work);
void synchronize_device(int device);

}  // namespace sim
