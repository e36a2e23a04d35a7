// NCCL: the ranks of a communicator meet in a folder of the machine. A collective runs on its stream
// and spins there until the parts of all ranks have come, or its communicator is aborted.
#include <fcntl.h>
#include <nccl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "machine.h"

using namespace sim;

namespace {

constexpr int kPollUs = 500;
using Bytes = std::vector<char>;

void write_whole(const std::string& path, const void* data, size_t size) {
  static std::atomic<unsigned> number{0};
  const std::string part = path + ".part" + std::to_string(getpid()) + "." + std::to_string(number++);
  std::ofstream(part, std::ios::binary).write(static_cast<const char*>(data), size);
  rename(part.c_str(), path.c_str());
}

bool read_whole(const std::string& path, Bytes& data) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return false;
  data.resize(file.tellg());
  file.seekg(0).read(data.data(), data.size());
  return true;
}

const std::string& process_token() {
  static const auto* token = new std::string(std::to_string(getpid()) + "-" + std::to_string(std::random_device{}()));
  return *token;
}

std::string process_file(const std::string& token) { return text_setting("SIMULATED_GPU_DIR") + "/process-" + token; }

// A process holds a lock on its file until it ends, in whatever namespace of processes it is.
void hold_process_file() {
  static const int file = open(process_file(process_token()).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  struct flock range {};
  range.l_type = F_WRLCK;
  fcntl(file, F_SETLK, &range);
}

bool has_ended(const std::string& token) {
  if (token == process_token()) return false;
  const int file = open(process_file(token).c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return true;
  struct flock range {};
  range.l_type = F_WRLCK;
  fcntl(file, F_GETLK, &range);
  close(file);
  return range.l_type == F_UNLCK;
}

}  // namespace

struct ncclComm {
  std::string directory;
  int rank, size, device;
  bool is_blocking;
  std::atomic<int> state{ncclInProgress}, error{ncclSuccess};
  std::atomic<bool> is_aborted{false}, is_closed{false};
  std::atomic<int> num_running{0};
  std::vector<std::string> members;  // tokens of the processes
  std::mutex lock;
  uint64_t num_collectives = 0, num_children = 0;
  std::map<std::pair<int, int>, uint64_t> num_messages;

  std::string file(const char* kind, int of) const { return directory + "/" + kind + "." + std::to_string(of); }

  bool wait_for_file(const std::string& path, Bytes& data) {
    while (!read_whole(path, data)) {
      if (is_aborted) return false;
      usleep(kPollUs);
    }
    return true;
  }

  void initialize() {
    hold_process_file();
    const std::string mine = host_name() + ":" + std::to_string(physical_device(device)) + " " + process_token();
    write_whole(file("here", rank), mine.data(), mine.size());
    if (setting("SIMULATED_GPU_NCCL_HANGING_INIT", 0)) {
      while (!is_aborted) usleep(kPollUs);
      return;
    }
    std::map<std::string, int> ranks;  // by host and device
    for (int peer = 0; peer < size; peer++) {
      Bytes data;
      if (!wait_for_file(file("here", peer), data)) return;
      const std::string text(data.begin(), data.end());
      members.push_back(text.substr(text.find(' ') + 1));
      const std::string where = text.substr(0, text.find(' '));
      if (ranks.count(where)) {
        fprintf(stderr, "NCCL WARN Duplicate GPU detected : rank %d and rank %d both on %s\n", ranks[where], peer, where.c_str());
        log_event("duplicate_gpu", "\"where\": \"" + where + "\"");
        error = state = ncclInvalidUsage;
        return;
      }
      ranks[where] = peer;
    }
    state = ncclSuccess;
    std::thread([this] { watch_members(); }).detach();
  }

  // As NCCL's proxy thread: it meets the broken connection of a dead peer, sooner or later or never.
  void watch_members() {
    const long delay_ms = setting("SIMULATED_GPU_NCCL_ERROR_MS", 300);
    while (delay_ms >= 0 && !is_aborted && !is_closed) {
      usleep(50000);
      for (const std::string& member : members) {
        if (!has_ended(member)) continue;
        usleep(delay_ms * 1000);
        if (!is_aborted && !is_closed) error = ncclRemoteError;
        log_event("nccl_error", "\"rank\": " + std::to_string(rank));
        return;
      }
    }
  }
};

namespace {

ncclResult_t start(ncclComm_t* made, const std::string& directory, int size, int rank, const ncclConfig_t* config) {
  if (cudaError_t error = enter("ncclCommInitRank")) return error ? ncclUnhandledCudaError : ncclSuccess;
  auto* comm = new ncclComm;
  comm->directory = directory;
  mkdir(directory.c_str(), 0700);
  comm->rank = rank;
  comm->size = size;
  comm->device = current_device();
  comm->is_blocking = !config || config->blocking != 0;
  log_event("nccl_init", "\"rank\": " + std::to_string(rank) + ", \"size\": " + std::to_string(size) +
                             ", \"device\": " + std::to_string(physical_device(comm->device)));
  *made = comm;
  if (comm->is_blocking) {
    comm->initialize();
    return ncclResult_t(comm->state.load());
  }
  std::thread([comm] { comm->initialize(); }).detach();
  return ncclInProgress;
}

size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  BFloat16& operator=(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    return *this;
  }
};

template <class T, class Number>
void reduce_as(char* into, const char* other, size_t count, ncclRedOp_t op, int divisor) {
  T* a = reinterpret_cast<T*>(into);
  const T* b = reinterpret_cast<const T*>(other);
  for (size_t i = 0; i < count; i++) {
    const Number x = a[i], y = b[i];
    const Number sum = op == ncclMax ? std::max(x, y) : op == ncclMin ? std::min(x, y) : op == ncclProd ? x * y : x + y;
    a[i] = Number(sum / divisor);
  }
}

// Reduce `other` into `into`; a divisor above 1 ends a mean.
void reduce(char* into, const char* other, size_t count, ncclDataType_t type, ncclRedOp_t op, int divisor) {
  switch (type) {
    case ncclFloat32: return reduce_as<float, float>(into, other, count, op, divisor);
    case ncclFloat64: return reduce_as<double, double>(into, other, count, op, divisor);
    case ncclFloat16: return reduce_as<_Float16, float>(into, other, count, op, divisor);
    case ncclBfloat16: return reduce_as<BFloat16, float>(into, other, count, op, divisor);
    case ncclInt8: return reduce_as<int8_t, int>(into, other, count, op, divisor);
    case ncclUint8: return reduce_as<uint8_t, int>(into, other, count, op, divisor);
    case ncclInt32: return reduce_as<int32_t, int64_t>(into, other, count, op, divisor);
    case ncclInt64: return reduce_as<int64_t, int64_t>(into, other, count, op, divisor);
    default: fprintf(stderr, "simulated NCCL: type %d is missing\n", type), abort();
  }
}

void reduce_parts(std::vector<Bytes>& parts, size_t begin, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  for (size_t i = 1; i < parts.size(); i++) {
    const bool is_mean = op == ncclAvg && i + 1 == parts.size();
    reduce(parts[0].data() + begin, parts[i].data() + begin, count, type, op, is_mean ? int(parts.size()) : 1);
  }
}

// Write the own part, spin until every rank's has come, and combine them.
template <class Combine>
ncclResult_t collective(ncclComm_t comm, cudaStream_t stream, const void* sent, size_t bytes, Combine combine) {
  if (comm->state != ncclSuccess) return ncclInvalidUsage;
  uint64_t number;
  {
    std::lock_guard<std::mutex> guard(comm->lock);
    number = comm->num_collectives++;
  }
  const char* mine = host_view(sent);
  enqueue(stream, [=]() mutable {
    comm->num_running++;
    const std::string name = "part" + std::to_string(number), before = "part" + std::to_string(number - 1);
    std::vector<Bytes> parts(comm->size);
    bool have_come = !comm->is_aborted;
    if (have_come) write_whole(comm->file(name.c_str(), comm->rank), mine, bytes);
    for (int i = 0; i < comm->size && have_come; i++)
      have_come = comm->wait_for_file(comm->file(name.c_str(), i), parts[i]);
    if (have_come) {
      combine(parts);
      if (number) unlink(comm->file(before.c_str(), comm->rank).c_str());  // all have begun this one, so have read that
    }
    comm->num_running--;
  });
  return ncclSuccess;
}

}  // namespace

API ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclInProgress: return "NCCL operation in progress";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    default: return "an error of NCCL";
  }
}
API const char* ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  std::random_device random;
  snprintf(id->internal, sizeof id->internal, "nccl-%08x%08x%08x", random(), random(), random());
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return start(comm, text_setting("SIMULATED_GPU_DIR") + "/" + id.internal, size, rank, config);
}
API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, config);
}
API ncclResult_t ncclCommShrink(ncclComm_t parent, int* left_out, int num, ncclComm_t* comm, ncclConfig_t* config, int) {
  const auto is_out = [&](int rank) { return std::find(left_out, left_out + num, rank) != left_out + num; };
  int rank = 0;
  for (int peer = 0; peer < parent->rank; peer++) rank += !is_out(peer);
  const std::string directory = parent->directory + "-shrunk" + std::to_string(parent->num_children++);
  return start(comm, directory, parent->size - num, rank, config);
}
API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm, ncclConfig_t* config) {
  const std::string name = "split" + std::to_string(parent->num_children++);
  const int mine[] = {color, key};
  write_whole(parent->file(name.c_str(), parent->rank), mine, sizeof mine);
  std::vector<std::pair<int, int>> members;  // key and rank of those with this color
  for (int peer = 0; peer < parent->size; peer++) {
    Bytes data;
    if (!parent->wait_for_file(parent->file(name.c_str(), peer), data)) return ncclInternalError;
    const int* other = reinterpret_cast<const int*>(data.data());
    if (other[0] == color) members.push_back({other[1], peer});
  }
  *comm = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  const auto found = std::find(members.begin(), members.end(), std::make_pair(key, parent->rank));
  const std::string directory = parent->directory + "-" + name + "-" + std::to_string(color);
  return start(comm, directory, members.size(), found - members.begin(), config);
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  *result = ncclResult_t(comm->error ? comm->error.load() : comm->state.load());
  return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) { return *size = comm->size, ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return *device = comm->device, ncclSuccess; }
API ncclResult_t ncclCommFinalize(ncclComm_t comm) { return comm->is_closed = true, ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommFinalize(comm); }
API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  log_event("nccl_abort", "\"rank\": " + std::to_string(comm->rank) + ", \"running\": " + std::to_string(comm->num_running));
  usleep(1000 * setting("SIMULATED_GPU_NCCL_ABORT_MS", 20));
  comm->is_aborted = true;
  while (comm->num_running) usleep(kPollUs);
  return ncclSuccess;
}
API ncclResult_t ncclCommRevoke(ncclComm_t comm, int) { return comm->is_aborted = true, ncclSuccess; }
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { return *handle = handle, ncclSuccess; }
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t ncclGroupStart() { return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  return ncclInvalidUsage;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess;
}
API ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess; }

// ---- collectives

API ncclResult_t ncclAllReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  char* to = host_view(received);
  const size_t bytes = count * width(type);
  return collective(comm, stream, sent, bytes, [=](std::vector<Bytes>& parts) {
    reduce_parts(parts, 0, count, type, op);
    memcpy(to, parts[0].data(), bytes);
  });
}
API ncclResult_t ncclReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                            ncclComm_t comm, cudaStream_t stream) {
  char* to = host_view(received);
  const size_t bytes = count * width(type);
  return collective(comm, stream, sent, bytes, [=](std::vector<Bytes>& parts) {
    if (comm->rank != root) return;
    reduce_parts(parts, 0, count, type, op);
    memcpy(to, parts[0].data(), bytes);
  });
}
API ncclResult_t ncclBroadcast(const void* sent, void* received, size_t count, ncclDataType_t type, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  char* to = host_view(received);
  const size_t bytes = count * width(type);
  return collective(comm, stream, sent, comm->rank == root ? bytes : 0,
                    [=](std::vector<Bytes>& parts) { memcpy(to, parts[root].data(), bytes); });
}
API ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
API ncclResult_t ncclAllGather(const void* sent, void* received, size_t count, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream) {
  char* to = host_view(received);
  const size_t bytes = count * width(type);
  return collective(comm, stream, sent, bytes, [=](std::vector<Bytes>& parts) {
    for (size_t i = 0; i < parts.size(); i++) memcpy(to + i * bytes, parts[i].data(), bytes);
  });
}
API ncclResult_t ncclReduceScatter(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t comm, cudaStream_t stream) {
  char* to = host_view(received);
  const size_t bytes = count * width(type), begin = comm->rank * bytes;
  return collective(comm, stream, sent, bytes * comm->size, [=](std::vector<Bytes>& parts) {
    reduce_parts(parts, begin, count, type, op);
    memcpy(to, parts[0].data() + begin, bytes);
  });
}
static std::string message(ncclComm_t comm, int from, int to) {
  std::lock_guard<std::mutex> guard(comm->lock);
  const std::string name = "message" + std::to_string(comm->num_messages[{from, to}]++) + "-" + std::to_string(from);
  return comm->file(name.c_str(), to);
}
API ncclResult_t ncclSend(const void* sent, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  const std::string path = message(comm, comm->rank, peer);
  const char* data = host_view(sent);
  enqueue(stream, [=] { if (!comm->is_aborted) write_whole(path, data, count * width(type)); });
  return ncclSuccess;
}
API ncclResult_t ncclRecv(void* received, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  const std::string path = message(comm, peer, comm->rank);
  char* to = host_view(received);
  enqueue(stream, [=] {
    comm->num_running++;
    Bytes data;
    if (comm->wait_for_file(path, data)) {
      memcpy(to, data.data(), std::min(data.size(), count * width(type)));
      unlink(path.c_str());
    }
    comm->num_running--;
  });
  return ncclSuccess;
}
