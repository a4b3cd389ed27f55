/* The generators of the devices, and the hooks by which torch asks for what a device has. */

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

namespace dev {
namespace {

/* Draws what a CPU's generator draws with the same seed. */
struct DeviceGenerator final : c10::GeneratorImpl {
    at::Generator played;

    DeviceGenerator(int device, at::Generator generator)
        : GeneratorImpl(
              c10::Device(TYPE, c10::DeviceIndex(device)),
              c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          played(std::move(generator)) {}

    void set_current_seed(uint64_t seed) override { played.set_current_seed(seed); }
    uint64_t current_seed() const override { return played.current_seed(); }
    uint64_t seed() override { return played.seed(); }
    void set_offset(uint64_t offset) override { played.set_offset(offset); }
    uint64_t get_offset() const override { return played.get_offset(); }
    void set_state(const c10::TensorImpl &state) override {
        played.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return played.unsafeGetGeneratorImpl()->get_state();
    }
    DeviceGenerator *clone_impl() const override {
        return new DeviceGenerator(device().index(), played.clone());
    }
};

at::Generator new_generator(int device) {
    check_device(device);
    return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(num_devices()); }
    c10::DeviceIndex getCurrentDevice() const override {
        return c10::DeviceIndex(current_device());
    }
    void setCurrentDevice(c10::DeviceIndex device) const override { exchangeDevice(device); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        auto *guard = c10::impl::getDeviceGuardImpl(TYPE);
        return guard->exchangeDevice(c10::Device(TYPE, device)).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? getCurrentDevice() : exchangeDevice(device);
    }
    at::Device getDeviceFromPtr(void *data) const override {
        int device = device_of(data);
        TORCH_CHECK(device >= 0, data, " is no address of the test device's memory.");
        return {TYPE, c10::DeviceIndex(device)};
    }
    bool isPinnedPtr(const void *data) const override { return is_pinned(data); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device < 0 ? current_device() : device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return new_generator(device < 0 ? current_device() : device);
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        resize_storage(storage.unsafeGetStorageImpl(), bytes);
    }
};

[[maybe_unused]] const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

} // namespace

const at::Generator &default_generator(int device) {
    static const auto *all = [] {
        auto *made = new std::vector<at::Generator>;
        for (int i = 0; i < num_devices(); i++) made->push_back(new_generator(i));
        return made;
    }();
    check_device(device);
    return (*all)[device];
}

at::Generator on_cpu(const at::Generator &generator) {
    auto *found = dynamic_cast<DeviceGenerator *>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(
        found, "Expected a 'dev' device type for generator but found '", generator.device(), "'.");
    return found->played;
}

} // namespace dev
