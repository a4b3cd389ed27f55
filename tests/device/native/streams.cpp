/* Streams whose work is late, and the check that nobody relies on work that he has not waited for.

   A kernel runs at once, in the thread that launches it. What it may know of is counted with vector
   clocks: each stream, and the host, holds how far it has seen every stream come. An event carries
   its stream's clock to whoever waits for it. A kernel that touches bytes which another stream has
   used, with at least one of the two writing, must have seen that use. Otherwise it raises, however
   the race would have ended here: on a device of its own it may end in either way.

   The host sees nothing of a copy to pinned memory until it has waited for it, and may not touch
   pinned memory that is still being read. */

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <chrono>
#include <cstring>
#include <string>

namespace dev {
namespace {

using Seconds = std::chrono::duration<double>;

struct Stream {
    std::mutex running; /* held while a kernel of the stream runs */
    Clock clock;
    uint64_t asked = 0; /* the count at which somebody asked in vain whether it was done */
};

/* A copy between a device and pinned memory of which the host has not heard yet. */
struct Late {
    int stream;
    uint64_t count;
    at::Tensor host, staged;
    bool to_host;
};

struct State {
    std::vector<Stream> streams;
    Clock host;
    std::vector<Late> late;
    std::mutex settling; /* before the book */
    std::vector<std::string> races;
    std::atomic<int64_t> kernels[MOST_DEVICES] = {};
    std::atomic<int> next[MOST_DEVICES] = {}; /* of the pool */
    Copies copies[(MOST_DEVICES + 1) * (MOST_DEVICES + 1)];

    State() : streams(num_devices() * STREAMS_PER_DEVICE), host(streams.size()) {
        for (auto &stream : streams) stream.clock.resize(streams.size());
    }
};

State &state() {
    static auto *made = new State;
    return *made;
}

std::atomic<bool> forked{false};
thread_local int current = 0;
thread_local int current_streams[MOST_DEVICES] = {};

void join(Clock &into, const Clock &seen) {
    for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], seen[i]);
}

std::string name_of(int stream) {
    auto device = std::to_string(stream / STREAMS_PER_DEVICE);
    return "stream " + std::to_string(stream % STREAMS_PER_DEVICE) + " of dev:" + device;
}

void raise(const std::string &race) {
    state().races.push_back(race);
    TORCH_CHECK(false, race);
}

bool same_memory(const at::Tensor &a, const at::Tensor &b) {
    return a.storage().data() == b.storage().data();
}

at::Tensor without_python(const at::Tensor &host) {
    at::AutoDispatchBelowADInplaceOrView below;
    return host.alias();
}

void fill_with_rubbish(at::Tensor host) {
    if (host.is_floating_point() || host.is_complex()) {
        host.fill_(std::numeric_limits<double>::quiet_NaN());
    } else {
        host.fill_(host.scalar_type() == at::kBool ? 1 : 0x55);
    }
}

bool same_bytes(const at::Tensor &a, const at::Tensor &b) {
    auto first = a.contiguous(), second = b.contiguous();
    return !std::memcmp(first.const_data_ptr(), second.const_data_ptr(), first.nbytes());
}

/* End copies, in the order of their launch. Returns what is wrong. */
std::string end(std::vector<Late> &ending) {
    at::AutoDispatchBelowADInplaceOrView below;
    std::string wrong;
    for (auto &late : ending) {
        if (late.to_host) {
            late.host.copy_(late.staged);
        } else if (!same_bytes(late.host, late.staged)) {
            wrong = "The host has changed pinned memory before " + name_of(late.stream) +
                    " had copied it.";
        }
    }
    return wrong;
}

/* The host has waited until `seen`. */
void join_host(const Clock &seen) {
    std::vector<Late> ending;
    std::string wrong;
    {
        std::lock_guard<std::mutex> settling(state().settling);
        {
            std::lock_guard<std::mutex> guard(book());
            join(state().host, seen);
            auto &all = state().late;
            for (auto &late : all) {
                if (late.count <= state().host[late.stream]) ending.push_back(std::move(late));
            }
            std::erase_if(all, [](const Late &late) { return !late.host.defined(); });
        }
        wrong = end(ending);
    }
    if (wrong.empty()) return;
    std::lock_guard<std::mutex> guard(book());
    raise(wrong);
}

Clock clock_of(int stream) {
    auto &found = state().streams[stream];
    std::lock_guard<std::mutex> running(found.running);
    std::lock_guard<std::mutex> guard(book());
    join(found.clock, state().host);
    return found.clock;
}

c10::Stream stream_at(int device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}

bool done(int stream, uint64_t count) {
    std::lock_guard<std::mutex> guard(book());
    return count <= state().host[stream];
}

/* Where in its storage a tensor's bytes lie. Tensors that interleave seem to overlap. */
std::pair<size_t, size_t> extent(const at::Tensor &tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); dim++) {
        last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    auto begin = size_t(tensor.storage_offset()) * tensor.itemsize();
    return {begin, begin + size_t(last + 1) * tensor.itemsize()};
}

struct Event {
    Clock clock;
    int stream;
    uint64_t count;
    bool asked = false;
    Seconds at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {TYPE, c10::DeviceIndex(current)}; }
    void setDevice(c10::Device device) const override {
        check_device(device.index());
        current = device.index();
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        current = device.index();
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return c10::DeviceIndex(num_devices());
    }

    c10::Stream getStream(c10::Device device) const override {
        return current_stream(device.has_index() ? device.index() : current);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return stream_at(device.has_index() ? device.index() : current, 0);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        int index = device.has_index() ? device.index() : current;
        check_device(index);
        return stream_at(index, 1 + state().next[index]++ % (STREAMS_PER_DEVICE - 1));
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return getStreamFromGlobalPool(device, false);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        auto before = current_stream(stream.device_index());
        current_streams[stream.device_index()] = int(stream.id());
        return before;
    }
    bool queryStream(const c10::Stream &stream) const override {
        int index = index_of(stream);
        auto clock = clock_of(index);
        if (done(index, clock[index])) return true;
        if (std::exchange(state().streams[index].asked, clock[index]) != clock[index]) return false;
        join_host(clock);
        return true;
    }
    void synchronizeStream(const c10::Stream &stream) const override {
        join_host(clock_of(index_of(stream)));
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        synchronize_device(device < 0 ? current : device);
    }
    void recordDataPtrOnStream(const c10::DataPtr &ptr, const c10::Stream &stream) const override {
        record_use_on(ptr.get(), stream);
    }

    void record(
        void **event, const c10::Stream &stream, const c10::DeviceIndex,
        const c10::EventFlag) const override {
        if (!*event) *event = new Event;
        auto *found = static_cast<Event *>(*event);
        found->stream = index_of(stream);
        found->clock = clock_of(found->stream);
        found->count = found->clock[found->stream];
        found->asked = false;
        found->at = Seconds(std::chrono::steady_clock::now().time_since_epoch());
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (!event) return;
        std::lock_guard<std::mutex> guard(book());
        join(state().streams[index_of(stream)].clock, static_cast<Event *>(event)->clock);
    }
    bool queryEvent(void *event) const override {
        auto *found = static_cast<Event *>(event);
        if (!found || done(found->stream, found->count)) return true;
        if (!std::exchange(found->asked, true)) return false;
        join_host(found->clock);
        return true;
    }
    void synchronizeEvent(void *event) const override {
        if (event) join_host(static_cast<Event *>(event)->clock);
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event *>(event);
    }
    double elapsedTime(void *from, void *to, const c10::DeviceIndex) const override {
        auto *first = static_cast<Event *>(from), *last = static_cast<Event *>(to);
        TORCH_CHECK(
            done(first->stream, first->count) && done(last->stream, last->count),
            "Both events must be over before their time is asked for.");
        return 1000 * (last->at - first->at).count();
    }
};

} // namespace

int current_device() { return current; }
bool is_forked() { return forked; }
uint64_t count_of(int stream) { return state().streams[stream].clock[stream]; }
std::atomic<int64_t> &kernels(int device) { return state().kernels[device]; }

const std::vector<std::string> &races() { return state().races; }
void forget_races() {
    std::lock_guard<std::mutex> guard(book());
    state().races.clear();
}

Copies &copies(int from, int to) {
    return state().copies[(from + 1) * (MOST_DEVICES + 1) + to + 1];
}

void check_device(int device) {
    static const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });
    TORCH_CHECK(!at_fork && !forked, "The test device cannot be used in a forked child; spawn it.");
    TORCH_CHECK(
        0 <= device && device < num_devices(), "There are ", num_devices(),
        " test devices, and none is dev:", device, ".");
}

c10::Stream current_stream(int device) {
    check_device(device);
    return stream_at(device, current_streams[device]);
}

int index_of(c10::Stream stream) {
    return stream.device_index() * STREAMS_PER_DEVICE + int(stream.id());
}

bool has_seen(int stream, int other, uint64_t count) {
    return count <= state().streams[stream].clock[other] || count <= state().host[other];
}

void synchronize_device(int device) {
    check_device(device);
    Clock all(state().host.size());
    for (int id = 0; id < STREAMS_PER_DEVICE; id++) {
        join(all, clock_of(index_of(stream_at(device, id))));
    }
    join_host(all);
}

Launch::Launch(c10::Stream stream) : stream_(index_of(stream)) {
    check_device(stream.device_index());
    held_.emplace_back(state().streams[stream_].running);
}

Launch::Launch(c10::Stream from, c10::Stream to) : stream_(index_of(from)), other_(index_of(to)) {
    check_device(from.device_index());
    check_device(to.device_index());
    for (int index : {std::min(stream_, other_), std::max(stream_, other_)}) {
        held_.emplace_back(state().streams[index].running);
    }
}

Launch::~Launch() {
    if (other_ < 0) return;
    std::lock_guard<std::mutex> guard(book());
    join(state().streams[other_].clock, state().streams[stream_].clock);
}

void Launch::add(const at::Tensor &tensor, bool write) {
    if (!tensor.numel()) return;
    auto [begin, end] = extent(tensor);
    add(tensor.storage().data(), begin, end, write);
}

void Launch::add(const void *address, size_t begin, size_t end, bool write) {
    int device = device_of(address), own = stream_ / STREAMS_PER_DEVICE;
    int second = other_ < 0 ? own : other_ / STREAMS_PER_DEVICE;
    TORCH_CHECK(device >= 0, "A kernel on dev:", own, " got the address ", address, " of the host.");
    TORCH_CHECK(
        device == own || device == second, "A kernel on dev:", own, " got the address ", address,
        " of dev:", device, ".");
    uses_.push_back({{begin, end, stream_, 0, write}, address});
}

void Launch::check(const char *what) {
    std::lock_guard<std::mutex> guard(book());
    auto &clock = state().streams[stream_].clock;
    join(clock, state().host);
    if (other_ >= 0) join(clock, state().streams[other_].clock);
    count_ = ++clock[stream_];
    state().kernels[stream_ / STREAMS_PER_DEVICE]++;
    std::string race;
    for (auto &[use, address] : uses_) {
        use.count = count_;
        auto *block = block_of(address);
        auto offset = size_t(static_cast<const char *>(address) - block->address);
        use.begin += offset;
        use.end += offset;
        auto &uses = block->uses;
        for (auto &other : uses) {
            if (!(use.write || other.write) || other.end <= use.begin || use.end <= other.begin ||
                has_seen(stream_, other.stream, other.count)) {
                continue;
            }
            race = std::string("`") + what + "` on " + name_of(stream_) +
                   (use.write ? " writes" : " reads") + " memory that " + name_of(other.stream) +
                   (other.write ? " has written" : " reads") + ", but has not waited for it.";
            if (other.former) race += " That was a former tensor there: `record_stream` is missing.";
        }
        std::erase_if(uses, [&use = use](const Use &other) {
            if (other.count <= state().host[other.stream]) return true;
            bool within = use.begin <= other.begin && other.end <= use.end;
            return within && (use.write || (!other.write && other.stream == use.stream));
        });
        uses.push_back(use);
    }
    if (!race.empty()) raise(race);
}

void Launch::wait() {
    Clock seen;
    {
        std::lock_guard<std::mutex> guard(book());
        seen = state().streams[stream_].clock;
    }
    join_host(seen);
}

void Launch::settle(const at::Tensor &host) {
    std::vector<Late> ending;
    std::lock_guard<std::mutex> settling(state().settling);
    {
        std::lock_guard<std::mutex> guard(book());
        for (auto &late : state().late) {
            if (!late.to_host || !same_memory(late.host, host)) continue;
            if (!has_seen(stream_, late.stream, late.count)) {
                raise(name_of(stream_) + " reads pinned memory that " + name_of(late.stream) +
                      " has written, but has not waited for it.");
            }
            ending.push_back(late);
            late.host.reset();
        }
        std::erase_if(state().late, [](const Late &late) { return !late.host.defined(); });
    }
    end(ending);
}

void Launch::write_late(const at::Tensor &host, at::Tensor staged) {
    auto own = without_python(host);
    std::vector<Late> over; /* what this stream has read there before is over by then */
    std::lock_guard<std::mutex> settling(state().settling);
    {
        std::lock_guard<std::mutex> guard(book());
        for (auto &late : state().late) {
            if (late.to_host || !same_memory(late.host, own)) continue;
            if (has_seen(stream_, late.stream, late.count)) over.push_back(std::move(late));
        }
        std::erase_if(state().late, [](const Late &late) { return !late.host.defined(); });
        state().late.push_back({stream_, count_, own, std::move(staged), true});
    }
    at::AutoDispatchBelowADInplaceOrView below;
    fill_with_rubbish(own);
}

void Launch::read_late(const at::Tensor &host) {
    auto own = without_python(host);
    at::AutoDispatchBelowADInplaceOrView below;
    auto staged = own.clone();
    std::lock_guard<std::mutex> guard(book());
    state().late.push_back({stream_, count_, own, std::move(staged), false});
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace dev
