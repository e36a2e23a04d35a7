// torch's operators for CUDA tensors: those with a CUDA kernel are computed by the CPU's, on the bytes
// of the simulated device, when the stream comes to them. No Python is involved, and no lock of its
// interpreter. An operator without a kernel for the CPU keeps its CUDA kernel, which names itself.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <set>

extern "C" {
void* simulated_gpu_host_view(const void*);
void simulated_gpu_enqueue(void* stream, std::function<void()>* work);
void simulated_gpu_break(int device, int error);
}

namespace {

using c10::IValue;
using torch::jit::Stack;

// A tensor of the CPU over the same simulated bytes, valid as long as those are.
at::Tensor view_of(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (!tensor.defined()) return tensor;
  if (!tensor.storage().nbytes()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* data = simulated_gpu_host_view(tensor.data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options, c10::Device(c10::kCPU));
}

// A generator of the CPU that continues where the device's is, which advances as CUDA's does.
at::Generator generator_from(at::Generator device_generator) {
  std::lock_guard<std::mutex> guard(device_generator.mutex());
  const uint64_t offset = device_generator.get_offset();
  device_generator.set_offset(offset + 4);
  auto made = at::globalContext().defaultGenerator(c10::Device(c10::kCPU)).clone();
  made.set_current_seed(device_generator.current_seed() * 1000003 + offset);
  return made;
}

enum class Place { kCpu, kMeta };

at::Tensor convert(const at::Tensor& tensor, Place place) {
  if (!tensor.defined()) return tensor;
  at::Tensor made;
  if (place == Place::kCpu)
    made = tensor.is_cuda() ? view_of(tensor) : tensor.clone();
  else if (!tensor.is_cuda() && tensor.dim() == 0)
    made = tensor.clone();
  else
    made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Convert an argument; `wants_generator`: it is the optional generator of a random operator.
IValue convert(const IValue& value, Place place, c10::Device device, bool wants_generator) {
  if (value.isTensor()) return convert(value.toTensor(), place);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor, place));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(convert(*tensor, place)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return c10::Device(place == Place::kCpu ? c10::kCPU : c10::kMeta);
  if (wants_generator) {
    if (place == Place::kMeta) return IValue();
    return generator_from(value.isNone() ? at::globalContext().defaultGenerator(device) : value.toGenerator());
  }
  return value;
}

bool is_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

Stack convert(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments, Place place, c10::Device device) {
  Stack converted;
  for (size_t i = 0; i < arguments.size(); i++)
    converted.push_back(convert(arguments[i], place, device, is_generator(schema.arguments()[i])));
  return converted;
}

void visit(const IValue& value, const std::function<void(const at::Tensor&)>& visitor) {
  if (value.isTensor() && value.toTensor().defined()) visitor(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) visitor(tensor);
}

c10::Device device_of(c10::ArrayRef<IValue> arguments) {
  c10::Device device(c10::kCUDA, c10::cuda::current_device());
  bool is_found = false;
  for (const IValue& argument : arguments) {
    const auto look = [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && !is_found) device = tensor.device(), is_found = true;
    };
    visit(argument, look);
    if (argument.isDevice() && argument.toDevice().has_index() && !is_found) device = argument.toDevice();
  }
  return device;
}

void enqueue(c10::Device device, const std::string& name, std::function<void()> compute) {
  std::function<void()> work = [compute = std::move(compute), device, name] {
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      compute();
    } catch (const std::exception& error) {
      fprintf(stderr, "simulated GPU: %s failed: %s\n", name.c_str(), error.what());
      simulated_gpu_break(device.index(), cudaErrorLaunchFailure);
    }
  };
  const c10::cuda::CUDAGuard guard(device);
  simulated_gpu_enqueue(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &work);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void synchronize(c10::Device device) {
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
}

at::Tensor like(const at::Tensor& meta, c10::Device device) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
}

IValue on_device(const IValue& value, c10::Device device) {
  if (value.isTensor() && value.toTensor().defined()) return like(value.toTensor(), device);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(like(tensor, device));
    return list;
  }
  return value;
}

void copy_results(const Stack& computed, const Stack& into) {
  for (size_t i = 0; i < computed.size(); i++) {
    std::vector<at::Tensor> from, to;
    visit(computed[i], [&](const at::Tensor& tensor) { from.push_back(tensor); });
    visit(into[i], [&](const at::Tensor& tensor) { to.push_back(tensor); });
    for (size_t k = 0; k < from.size(); k++) to[k].copy_(from[k]);
  }
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Give `out=` tensors the sizes that the operator will give them.
void resize_outputs(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments, c10::Device device) {
  Stack metas = convert(op.schema(), arguments, Place::kMeta, device), stack = metas;
  op.callBoxed(stack);
  for (size_t i = 0; i < arguments.size(); i++)
    if (is_written(op.schema().arguments()[i]) && arguments[i].isTensor() && arguments[i].toTensor().defined())
      if (arguments[i].toTensor().sizes() != metas[i].toTensor().sizes())
        arguments[i].toTensor().resize_(metas[i].toTensor().sizes());
}

// The results are known only after the computation, as those of `nonzero`; CUDA's kernels wait, too.
Stack compute_now(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments, c10::Device device) {
  synchronize(device);
  Stack stack = convert(op.schema(), arguments, Place::kCpu, device), results;
  op.callBoxed(stack);
  for (const IValue& value : stack) results.push_back(on_device(value, device));
  Stack aliases;
  for (const IValue& value : results) aliases.push_back(convert(value, Place::kCpu, device, false));
  copy_results(stack, aliases);
  return results;
}

// Mean and inverse deviation are float32 on a GPU; on the CPU they have the type of the weight.
void as_on_cpu(Stack& layer_norm_backward) {
  const IValue& weight = layer_norm_backward[5];
  const at::Tensor typed = weight.isTensor() ? weight.toTensor() : layer_norm_backward[1].toTensor();
  for (size_t i : {3, 4}) layer_norm_backward[i] = layer_norm_backward[i].toTensor().to(typed.scalar_type());
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Stack arguments(stack->end() - count, stack->end());
  stack->resize(stack->size() - count);
  const c10::Device device = device_of(arguments);
  const c10::cuda::CUDAGuard guard(device);
  Stack results;
  if (schema.is_mutable()) {
    if (schema.overload_name().find("out") != std::string::npos) resize_outputs(op, arguments, device);
    for (size_t i = 0; i < count; i++)
      if (is_written(schema.arguments()[i]) && results.size() < schema.returns().size()) results.push_back(arguments[i]);
    Stack cpu = convert(schema, arguments, Place::kCpu, device);
    enqueue(device, schema.name(), [op, cpu]() mutable { op.callBoxed(cpu); });
  } else {
    Stack metas;
    const bool returns_tensors = std::all_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
      return result.type()->str().find("Tensor") != std::string::npos;
    });
    try {
      metas = convert(schema, arguments, Place::kMeta, device);
      if (returns_tensors) op.callBoxed(metas);
    } catch (const std::exception&) {
      metas.clear();
    }
    if (!returns_tensors || metas.empty()) {
      results = compute_now(op, arguments, device);
    } else {
      Stack cpu = convert(schema, arguments, Place::kCpu, device), into;
      for (const IValue& value : metas) {
        results.push_back(on_device(value, device));
        into.push_back(convert(results.back(), Place::kCpu, device, false));
      }
      enqueue(device, schema.name(), [op, cpu, into]() mutable {
        if (op.schema().name() == "aten::native_layer_norm_backward") as_on_cpu(cpu);
        op.callBoxed(cpu);
        copy_results(cpu, into);
      });
    }
  }
  stack->insert(stack->end(), results.begin(), results.end());
}

// Copies between the host and a device are torch's own, by the runtime; on one device they would be
// a kernel unless both sides are laid out alike.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!self.is_cuda() || !source.is_cuda()) return at::native::copy_(self, source, non_blocking);
  if (self.device() != source.device()) synchronize(source.device());
  at::Tensor to = view_of(self), from = view_of(source);
  enqueue(self.device(), "copy_", [to, from]() mutable { to.copy_(from); });
  return self;
}

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// FSDP2's reduce-scatter: CUDA's kernel also converts, the CPU's does not.
at::Tensor& chunk_cat(at::TensorList tensors, int64_t dim, int64_t num_chunks, at::Tensor& out) {
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<at::Tensor> from;
  for (const at::Tensor& tensor : tensors) from.push_back(view_of(tensor));
  at::Tensor to = view_of(out);
  enqueue(out.device(), "_chunk_cat", [=]() mutable { to.copy_(at::_chunk_cat(from, dim, num_chunks)); });
  return out;
}

// Storage, views and copies: torch's own, which call the runtime.
const std::set<std::string> kKept = {
    "aten::_local_scalar_dense", "aten::record_stream", "aten::set_", "aten::resize_", "aten::empty", "aten::empty_strided",
    "aten::_efficientzerotensor", "aten::is_set_to", "aten::_pin_memory", "aten::is_pinned", "aten::copy_",
    "aten::native_dropout", "aten::as_strided", "aten::view", "aten::unfold",
    "aten::_reshape_alias", "aten::view_as_real", "aten::view_as_complex", "aten::_cudnn_init_dropout_state"};
// Composite ones that would choose cuDNN.
const std::set<std::string> kAdded = {"aten::convolution", "aten::convolution_backward", "aten::_batch_norm_impl_index"};

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  c10::WarningUtils::WarningHandlerGuard quiet([] {
    struct Silent : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    };
    static Silent silent;
    return &silent;
  }());
  auto& context = at::globalContext();  // attention by products, not by kernels of its own
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  m.impl("copy_", copy);
  m.impl("native_dropout", dropout);
  m.impl("_chunk_cat.out", chunk_cat);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || kKept.count(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    const bool has_gpu = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    const bool has_cpu = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    if ((!has_gpu || !has_cpu) && !kAdded.count(name.name)) continue;
    const auto& arguments = op->schema().arguments();
    const bool is_view = std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) {
      return argument.alias_info() && !argument.alias_info()->isWrite();
    });
    const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (is_view || full == "_chunk_cat.out") continue;
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
}
