/* The device's operators: what CPU kernels compute on the bytes of its tensors.

   A kernel gets tensors of the CPU that lie over the device's bytes, so views and in-place writes need
   no care. Only results, and what `out=` has resized, are copied. Storage, views and copies have
   functions of their own. */

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <unordered_map>

namespace dev {

void resize_storage(c10::StorageImpl *storage, size_t bytes) {
    c10::DeviceGuard guard(storage->device());
    auto fresh = allocator()->allocate(bytes);
    auto kept = std::min(bytes, storage->nbytes());
    if (kept) {
        auto options = at::TensorOptions().dtype(at::kByte);
        auto before = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), options.dtype());
        before.unsafeGetTensorImpl()->set_sizes_contiguous({int64_t(kept)});
        Launch launch(current_stream(storage->device().index()));
        launch.reads(before);
        launch.check("resize");
        std::memcpy(bytes_at(fresh.get()), bytes_at(storage->data()), kept);
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
}

namespace {

bool is_here(const at::Tensor &tensor) {
    return tensor.defined() && tensor.device().type() == TYPE;
}

/* The CPU's tensors over the device's bytes, for one kernel. Tensors of one storage stay such. */
class Views {
  public:
    at::Tensor over(const at::Tensor &tensor) {
        auto *own = tensor.storage().unsafeGetStorageImpl();
        auto found = storages_.find(own);
        if (found == storages_.end()) {
            auto device = tensor.device();
            void *bytes = bytes_at(own->data());
            TORCH_CHECK(
                !bytes || device_of(own->data()) == device.index(), "A tensor on ", device,
                " has an address of dev:", device_of(own->data()), ".");
            /* A kernel that resizes it gets memory of the CPU's own, which `resized` looks for. */
            c10::Storage storage(
                c10::Storage::use_byte_size_t(), own->nbytes(),
                c10::DataPtr(bytes, c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
            found = storages_.emplace(own, storage).first;
        }
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU),
            tensor.dtype());
        auto *impl = view.unsafeGetTensorImpl();
        impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
        view._set_conj(tensor.is_conj());
        view._set_neg(tensor.is_neg());
        return view;
    }

  private:
    std::unordered_map<c10::StorageImpl *, c10::Storage> storages_;
};

struct BelowAutograd {
    at::AutoDispatchBelowADInplaceOrView autograd;
    c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

at::Tensor empty_like_cpu(const at::Tensor &found, c10::Device device) {
    c10::DeviceGuard guard(device);
    return at::detail::empty_strided_generic(
        found.sizes(), found.strides(), allocator(),
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), found.scalar_type());
}

/* Take over a kernel's result; nobody else knows of its memory yet. */
at::Tensor moved(const at::Tensor &found, c10::Device device) {
    if (!found.defined()) return found;
    auto made = empty_like_cpu(found, device);
    if (found.numel()) {
        at::Tensor view = Views().over(made);
        view.copy_(found);
    }
    return made;
}

void take_over_size(const at::Tensor &tensor, const at::Tensor &view) {
    if (tensor.sizes() == view.sizes() && tensor.strides() == view.strides()) return;
    auto *impl = tensor.unsafeGetTensorImpl();
    void *bytes = bytes_at(tensor.storage().data());
    if (view.storage().data() != bytes) {
        auto *storage = tensor.storage().unsafeGetStorageImpl();
        c10::DeviceGuard guard(tensor.device());
        storage->set_data_ptr_noswap(allocator()->allocate(view.storage().nbytes()));
        storage->set_nbytes(view.storage().nbytes());
        if (storage->nbytes()) {
            std::memcpy(bytes_at(storage->data()), view.storage().data(), storage->nbytes());
        }
    }
    impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
}

/* Operators that change what their schemas do not name. */
bool changes_silently(const std::string &name, const std::string &argument) {
    return name == "aten::native_batch_norm" && argument.rfind("running_", 0) == 0;
}

/* Operators that want a tensor of the CPU beside those of the device, as on CUDA. */
bool takes_from_cpu(const std::string &name, const std::string &argument) {
    static const std::set<std::pair<std::string, std::string>> known = {
        {"aten::_pack_padded_sequence", "lengths"},
        {"aten::_pack_padded_sequence_backward", "batch_sizes"},
        {"aten::index", "indices"},
        {"aten::_unsafe_index", "indices"},
        {"aten::index_put", "indices"},
        {"aten::index_put_", "indices"},
        {"aten::_index_put_impl_", "indices"},
    };
    return known.count({name, argument}) > 0;
}

/* Finds the device that the tensors of a call share. */
struct DeviceFinder {
    const std::string &name;
    std::optional<c10::Device> device;

    void look_at(const at::Tensor &tensor, const std::string &argument) {
        if (!tensor.defined()) return;
        if (!is_here(tensor)) {
            TORCH_CHECK(
                tensor.device().is_cpu() && (!tensor.dim() || takes_from_cpu(name, argument)),
                "Expected all tensors to be on the same device, but `", argument, "` of `", name,
                "` is on ", tensor.device(), ".");
            return;
        }
        if (!device) device = tensor.device();
        TORCH_CHECK(
            *device == tensor.device(), "Expected all tensors to be on the same device, but `",
            argument, "` of `", name, "` is on ", tensor.device(), ", and others are on ", *device,
            ".");
    }
};

template <class Function> void each_tensor(const c10::IValue &value, Function function) {
    if (value.isTensor()) {
        function(value.toTensor());
    } else if (value.isTensorList()) {
        for (const at::Tensor &tensor : value.toTensorVector()) function(tensor);
    } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector()) {
            if (tensor) function(*tensor);
        }
    }
}

bool wants_generator(const c10::Argument &argument) {
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    return type->kind() == c10::TypeKind::GeneratorType;
}

/* Run an operator of the CPU on the device's bytes. `asked` is what the caller has called. */
void run(const c10::OperatorHandle &op, torch::jit::Stack *stack, const c10::FunctionSchema &asked) {
    const auto &arguments = asked.arguments();
    const auto begin = stack->size() - arguments.size();
    const std::string name = asked.operator_name().name;
    DeviceFinder finder{name, {}};
    std::optional<c10::Device> wanted;
    for (size_t i = 0; i < arguments.size(); i++) {
        auto &value = (*stack)[begin + i];
        each_tensor(value, [&](const at::Tensor &t) { finder.look_at(t, arguments[i].name()); });
        if (value.isDevice()) wanted = value.toDevice();
    }
    if (!finder.device) finder.device = wanted;
    c10::Device device = finder.device.value_or(c10::Device(TYPE));
    if (!device.has_index()) device = c10::Device(TYPE, c10::DeviceIndex(current_device()));
    c10::DeviceGuard guard(device);
    auto stream = current_stream(device.index());

    /* Who is the second to hold a tensor of Python's comes before the launch and goes after it: both
       take the interpreter's lock, whose holder may wait for the stream. */
    Views views;
    std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
    std::vector<std::pair<at::Tensor, at::Tensor>> changed;
    Launch launch(stream);
    for (size_t i = 0; i < arguments.size(); i++) {
        auto &value = (*stack)[begin + i];
        auto *alias = arguments[i].alias_info();
        bool write = (alias && alias->isWrite()) || changes_silently(name, arguments[i].name());
        auto view = [&](const at::Tensor &tensor) {
            if (!is_here(tensor)) return tensor;
            write ? launch.writes(tensor) : launch.reads(tensor);
            auto found = views.over(tensor);
            if (write) changed.emplace_back(tensor, found);
            return found;
        };
        if (value.isTensor()) {
            value = view(value.toTensor());
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> found;
            for (const at::Tensor &tensor : value.toTensorVector()) found.push_back(view(tensor));
            value = found;
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> found;
            for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector()) {
                found.push_back(tensor ? std::optional(view(*tensor)) : std::nullopt);
            }
            value = found;
        } else if (value.isDevice()) {
            value = c10::Device(c10::kCPU);
        } else if (wants_generator(arguments[i])) {
            value = on_cpu(value.isNone() ? default_generator(device.index()) : value.toGenerator());
        }
    }
    launch.check(name.c_str());

    BelowAutograd below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (auto &[tensor, view] : changed) take_over_size(tensor, view);

    const auto &returns = asked.returns();
    const auto results = stack->size() - returns.size();
    bool to_host = false;
    for (size_t i = 0; i < returns.size(); i++) {
        auto &value = (*stack)[results + i];
        if (auto *alias = returns[i].alias_info()) {
            TORCH_CHECK(alias->isWrite(), "The test device has no `", name, "`, which is a view.");
            for (size_t j = 0; j < arguments.size(); j++) {
                auto *other = arguments[j].alias_info();
                if (other && *other == *alias) value = given[j];
            }
        } else if (value.isTensor()) {
            value = moved(value.toTensor(), device);
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> found;
            for (const at::Tensor &tensor : value.toTensorVector()) {
                found.push_back(moved(tensor, device));
            }
            value = found;
        } else {
            to_host = true;
        }
    }
    if (to_host) launch.wait();
}

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    static const auto seeded = at::Tag::nondeterministic_seeded;
    const auto &schema = op.schema();
    bool random = op.hasTag(seeded);
    for (const auto &argument : schema.arguments()) random &= !wants_generator(argument);
    TORCH_CHECK(
        !random, "The test device has no `", schema.name(),
        "`, which would draw from the CPU's generator.");
    run(op, stack, schema);
}

void convolution(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    static const auto found =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    run(found, stack, found.schema());
}

void convolution_backward(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    static const auto found =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    auto begin = stack->end() - op.schema().arguments().size();
    auto bias_sizes = c10::IValue(c10::List<int64_t>({begin->toTensor().size(1)}));
    stack->insert(begin + 3, bias_sizes);
    run(found, stack, found.schema());
}

/* Tensors and their storage. */

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "The test device is for dense ones.");
    TORCH_CHECK(!pin.value_or(false), "Only memory of the CPU can be pinned.");
    c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(
        size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
    TORCH_CHECK(!pin.value_or(false), "Only memory of the CPU can be pinned.");
    c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(
        size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        c10::dtype_or_default(dtype));
}

void grow(const at::Tensor &tensor) {
    if (!tensor.numel()) return;
    auto bytes = at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
    auto *storage = tensor.storage().unsafeGetStorageImpl();
    if (bytes > storage->nbytes()) resize_storage(storage, bytes);
}

const at::Tensor &resize_(
    const at::Tensor &self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    grow(self);
    return self;
}

at::Tensor &set_storage(
    at::Tensor &self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
    at::native::checkSetStorage(self, source, offset, size, stride);
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_offset(offset);
    if (stride.data()) {
        impl->set_sizes_and_strides(size, stride);
    } else {
        impl->set_sizes_contiguous(size);
    }
    grow(self);
    return self;
}

at::Tensor &set_whole_storage(at::Tensor &self, at::Storage source) {
    auto number = int64_t(source.nbytes() / self.itemsize());
    return set_storage(self, std::move(source), 0, {number}, {1});
}

at::Tensor &set_tensor(at::Tensor &self, const at::Tensor &source) {
    if (self.is_same(source)) return self;
    return set_storage(
        self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor &set_nothing(at::Tensor &self) {
    c10::DeviceGuard guard(self.device());
    c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator(), true);
    return set_storage(self, std::move(none), 0, {0}, {1});
}

/* Copies. Between two devices, both current streams wait for each other, as on CUDA. */

at::Tensor &copy_(at::Tensor &self, const at::Tensor &source, bool non_blocking) {
    if (self.is_same(source)) return self;
    if (!self.numel()) {
        at::infer_size(source.sizes(), self.sizes());
        return self;
    }
    bool from_host = !is_here(source), to_host = !is_here(self);
    int from = from_host ? -1 : source.device().index(), to = to_host ? -1 : self.device().index();
    if (from != to) {
        auto &counted = copies(from, to);
        counted.number++;
        counted.bytes += int64_t(self.numel() * self.itemsize());
    }
    c10::DeviceGuard guard(from_host ? self.device() : source.device());
    auto stream = current_stream(from_host ? to : from);
    Views views;
    const at::Tensor held[] = {self, source}; /* see `run` */
    std::optional<Launch> launch;
    if (from_host || to_host || from == to) {
        launch.emplace(stream);
    } else {
        launch.emplace(stream, current_stream(to));
    }
    BelowAutograd below;
    auto read = from_host ? source : views.over(source);
    auto written = to_host ? self : views.over(self);
    if (!from_host) launch->reads(source);
    if (!to_host) launch->writes(self);
    launch->check("aten::copy_");
    bool late = non_blocking && (from_host   ? is_pinned(source.storage().data())
                                 : to_host ? is_pinned(self.storage().data())
                                           : false);
    if (from_host) launch->settle(source);
    if (to_host && late) {
        auto staged = at::empty_like(written).copy_(read);
        launch->write_late(self, staged);
        return self;
    }
    written.copy_(read);
    if (from_host && late) launch->read_late(source);
    if ((from_host && !non_blocking) || to_host) launch->wait();
    return self;
}

at::Tensor copy_from(const at::Tensor &self, const at::Tensor &to, bool non_blocking) {
    at::Tensor target = to;
    return copy_(target, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor &self, const at::Tensor &to) {
    to.resize_(self.sizes());
    return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor &self) {
    c10::DeviceGuard guard(self.device());
    Launch launch(current_stream(self.device().index()));
    Views views;
    BelowAutograd below;
    launch.reads(self);
    launch.check("aten::_local_scalar_dense");
    auto found = views.over(self).item();
    launch.wait();
    return found;
}

void record_stream(at::Tensor &self, c10::Stream stream) {
    record_use_on(self.storage().data(), stream);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor &input, double p, std::optional<bool> train) {
    if (!train.value_or(true)) {
        return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
    }
    double kept = 1 - p, scale = kept == 0 ? 0 : 1 / kept;
    auto mask = at::empty_like(input).bernoulli_(kept);
    return {input * mask.mul(scale), mask.to(at::kBool)};
}

/* As on CUDA, a parameter that a module moves here stays the same object, and tied where it was. */
bool may_become(const at::Tensor &self, const at::Tensor &other) {
    return self.layout() == at::kStrided && other.layout() == at::kStrided;
}

/* A kernel of a user's own: as one that is launched with <<<…>>>, it goes to the current device, and
   knows no more than an address. */
void scale_at(int64_t address, int64_t number, double factor) {
    auto *numbers = reinterpret_cast<double *>(address);
    Launch launch(current_stream(current_device()));
    launch.writes(numbers, size_t(number) * sizeof(double));
    launch.check("dev::scale_at");
    auto *bytes = reinterpret_cast<double *>(bytes_at(numbers));
    for (int64_t i = 0; i < number; i++) bytes[i] *= factor;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("resize_", TORCH_FN(resize_));
    m.impl("set_", TORCH_FN(set_nothing));
    m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
    m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    m.impl("unfold", TORCH_FN(at::native::unfold));
    m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
    m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
    m.impl("copy_", TORCH_FN(copy_));
    m.impl("_copy_from", TORCH_FN(copy_from));
    m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    m.impl("_local_scalar_dense", TORCH_FN(item));
    m.impl("record_stream", TORCH_FN(record_stream));
    m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_become));
    m.impl("native_dropout", TORCH_FN(native_dropout));
    /* torch would make them with `out=`, whose size it mistakes. */
    for (auto *name : {"mse_loss", "smooth_l1_loss"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
    m.impl(
        "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    m.impl(
        "convolution_backward_overrideable",
        torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
    m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_become));
}

TORCH_LIBRARY(dev, m) {
    m.def("scale_at", scale_at);
    m.def("num_devices", [] { return int64_t(num_devices()); });
    m.def("is_forked", [] { return is_forked(); });
    m.def("default_generator", [](int64_t device) { return default_generator(int(device)); });
    m.def("races", [] { return races(); });
    m.def("forget_races", forget_races);
    m.def("kernels", [](int64_t device) { return kernels(int(device)).load(); });
    m.def("copies", [](int64_t from, int64_t to) {
        auto &found = copies(int(from), int(to));
        return std::tuple<int64_t, int64_t>(found.number, found.bytes);
    });
}

} // namespace
} // namespace dev
