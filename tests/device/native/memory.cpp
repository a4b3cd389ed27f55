/* The memory of the devices, and pinned memory.

       one reservation:   | dev:0 | dev:1 | …  || dev:0 | dev:1 | …  |
                            addresses of tensors  the bytes themselves
                            (PROT_NONE)           (SPAN further)

   As in CUDA's caching allocator, a freed block is at once the next tensor's of its size and stream.
   New memory is filled with 0xFF: not a number. */

#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <tuple>

namespace dev {
namespace {

constexpr size_t SPAN = DEVICE_BYTES * MOST_DEVICES;

char *reserve() {
    auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *found = mmap(nullptr, 2 * SPAN, PROT_NONE, flags, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "The test device found no room for its addresses.");
    char *bytes = static_cast<char *>(found) + SPAN;
    TORCH_CHECK(
        !mprotect(bytes, DEVICE_BYTES * num_devices(), PROT_READ | PROT_WRITE),
        "The test device found no memory.");
    return static_cast<char *>(found);
}

char *base() {
    static char *const found = reserve();
    return found;
}

size_t rounded(size_t bytes) {
    size_t step = 512;
    while (step * 8 < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
}

struct DeviceAllocator final : c10::DeviceAllocator {
    std::map<const char *, Block *> blocks;
    std::map<std::tuple<int, int, size_t>, std::vector<Block *>> freed;
    size_t used[MOST_DEVICES] = {}, live[MOST_DEVICES] = {}, peak[MOST_DEVICES] = {};

    c10::DataPtr allocate(size_t bytes) override {
        int device = current_device();
        check_device(device);
        c10::Device named(TYPE, device);
        if (!bytes) return {nullptr, named};
        int stream = index_of(current_stream(device));
        Block *block;
        {
            std::lock_guard<std::mutex> guard(book());
            block = reused(device, stream, rounded(bytes));
            if (!block) block = cut(device, stream, rounded(bytes));
            block->live = true;
            live[device] += block->bytes;
            peak[device] = std::max(peak[device], live[device]);
        }
        std::memset(bytes_at(block->address), 0xFF, block->bytes);
        return {block->address, block, &free, named};
    }

    Block *reused(int device, int stream, size_t bytes) {
        auto &list = freed[{device, stream, bytes}];
        for (size_t i = list.size(); i-- > 0;) {
            Block *block = list[i];
            bool done = true;
            for (auto [other, count] : block->recorded) done &= has_seen(stream, other, count);
            if (!done) continue;
            list.erase(list.begin() + i);
            block->recorded.clear();
            for (auto &use : block->uses) use.former = true;
            return block;
        }
        return nullptr;
    }

    Block *cut(int device, int stream, size_t bytes) {
        TORCH_CHECK_WITH(
            OutOfMemoryError, used[device] + bytes <= DEVICE_BYTES, "dev:", device,
            " is out of memory: ", live[device], " bytes of ", DEVICE_BYTES, " are in use, ", bytes,
            " more were asked for.");
        char *address = base() + DEVICE_BYTES * device + used[device];
        used[device] += bytes;
        return blocks[address] = new Block{address, bytes, device, stream};
    }

    static DeviceAllocator &only() {
        static auto *made = new DeviceAllocator;
        return *made;
    }

    static void free(void *context) {
        auto *block = static_cast<Block *>(context);
        auto &self = only();
        std::lock_guard<std::mutex> guard(book());
        block->live = false;
        self.live[block->device] -= block->bytes;
        for (auto &[stream, count] : block->recorded) count = count_of(stream);
        self.freed[{block->device, block->stream, block->bytes}].push_back(block);
    }

    /* torch calls it where it clones a storage. */
    void copy_data(void *dest, const void *src, size_t count) const override {
        std::memcpy(bytes_at(dest), bytes_at(src), count);
    }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {} /* blocks must remember who used them */
    void recordStream(const c10::DataPtr &ptr, c10::Stream stream) override {
        record_use_on(ptr.get(), stream);
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        c10::CachingDeviceAllocator::DeviceStats stats;
        std::lock_guard<std::mutex> guard(book());
        auto &found = stats.allocated_bytes[0];
        found.current = int64_t(live[device]);
        found.peak = int64_t(peak[device]);
        stats.reserved_bytes[0].current = int64_t(used[device]);
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> guard(book());
        peak[device] = live[device];
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        std::lock_guard<std::mutex> guard(book());
        return {DEVICE_BYTES - live[device], DEVICE_BYTES};
    }
};

/* Memory of the host that is marked as pinned: only copies there may be late. */
struct PinnedAllocator final : c10::Allocator {
    std::mutex guard;
    std::map<const char *, size_t> pieces;

    static PinnedAllocator &only() {
        static auto *made = new PinnedAllocator;
        return *made;
    }

    c10::DataPtr allocate(size_t bytes) override {
        if (!bytes) return {nullptr, c10::kCPU};
        void *found = c10::alloc_cpu(bytes);
        std::lock_guard<std::mutex> held(guard);
        pieces[static_cast<char *>(found)] = bytes;
        return {found, found, &free, c10::kCPU};
    }
    static void free(void *address) {
        {
            std::lock_guard<std::mutex> held(only().guard);
            only().pieces.erase(static_cast<char *>(address));
        }
        c10::free_cpu(address);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void *dest, const void *src, size_t count) const override {
        default_copy_data(dest, src, count);
    }
    bool holds(const void *address) {
        std::lock_guard<std::mutex> held(guard);
        auto after = pieces.upper_bound(static_cast<const char *>(address));
        if (after == pieces.begin()) return false;
        auto [begin, bytes] = *std::prev(after);
        return address < begin + bytes;
    }
};

} // namespace

int num_devices() {
    static const int number = [] {
        const char *told = std::getenv("TEST_DEVICES");
        int found = told ? std::atoi(told) : 2;
        TORCH_CHECK(
            0 < found && found <= MOST_DEVICES, "`TEST_DEVICES` must be from 1 to ", MOST_DEVICES,
            ", but is '", told, "'.");
        return found;
    }();
    return number;
}

std::mutex &book() {
    static auto *made = new std::mutex;
    return *made;
}

c10::Allocator *allocator() { return &DeviceAllocator::only(); }
c10::Allocator *pinned_allocator() { return &PinnedAllocator::only(); }
bool is_pinned(const void *address) { return PinnedAllocator::only().holds(address); }

int device_of(const void *address) {
    auto offset = static_cast<const char *>(address) - base();
    if (offset < 0 || size_t(offset) >= DEVICE_BYTES * num_devices()) return -1;
    return int(offset / DEVICE_BYTES);
}

char *bytes_at(const void *address) {
    if (!address) return nullptr;
    TORCH_CHECK(device_of(address) >= 0, address, " is no address of the test device's memory.");
    return const_cast<char *>(static_cast<const char *>(address)) + SPAN;
}

Block *block_of(const void *address) {
    auto &blocks = DeviceAllocator::only().blocks;
    auto after = blocks.upper_bound(static_cast<const char *>(address));
    return after == blocks.begin() ? nullptr : std::prev(after)->second;
}

void record_use_on(const void *address, c10::Stream stream) {
    if (device_of(address) < 0) return;
    std::lock_guard<std::mutex> guard(book());
    Block *block = block_of(address);
    int other = index_of(stream);
    if (other != block->stream) block->recorded[other] = 0;
}

REGISTER_ALLOCATOR(TYPE, dev::allocator())

} // namespace dev
