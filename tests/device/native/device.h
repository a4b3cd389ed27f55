/* The test device: an accelerator of several devices that the CPU plays; see ../README.md.

   A tensor's address lies in memory that nobody may touch. The bytes lie `SPAN` further, and only
   what the device runs goes there. Every kernel runs at once, in the thread that launches it, but
   what it may rely on is counted as if all streams were late: see streams.cpp. */

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace dev {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 8;
constexpr int STREAMS_PER_DEVICE = 33; /* the default one, and CUDA's pool of 32 */
constexpr size_t DEVICE_BYTES = size_t(4) << 30;

int num_devices();
int current_device();
void check_device(int device); /* also refuses to work in a forked child, as CUDA does */
bool is_forked();

/* How far each stream has come, by stream. */
using Clock = std::vector<uint64_t>;

/* A use of bytes [begin, end) of a block by work number `count` of a stream. */
struct Use {
    size_t begin, end;
    int stream;
    uint64_t count;
    bool write;
    bool former = false; /* by a tensor that is gone */
};

/* A piece of a device's memory. What used it outlives the tensor: who gets it next must wait. */
struct Block {
    char *address;
    size_t bytes;
    int device;
    int stream; /* whose work may have it next */
    bool live = false;
    std::vector<Use> uses;
    std::map<int, uint64_t> recorded; /* other streams that `record_stream` named, and when freed */
};

/* Guards the blocks and the clocks; held for moments, never while a kernel runs. */
std::mutex &book();

c10::Allocator *allocator();
char *bytes_at(const void *address);       /* where the bytes of a device's address lie */
int device_of(const void *address);        /* -1 if it is of no device */
Block *block_of(const void *address);      /* call with the book held */
void record_use_on(const void *address, c10::Stream stream);
bool is_pinned(const void *address);
c10::Allocator *pinned_allocator();

/* Work on one stream, or a copy between two. The streams are the launch's until it ends. */
class Launch {
  public:
    explicit Launch(c10::Stream stream);
    Launch(c10::Stream from, c10::Stream to);
    ~Launch();
    Launch(const Launch &) = delete;

    void reads(const at::Tensor &tensor) { add(tensor, false); }
    void writes(const at::Tensor &tensor) { add(tensor, true); }
    void writes(const void *address, size_t bytes) { add(address, 0, bytes, true); }
    void check(const char *what); /* raises where another stream's work has not been waited for */
    void wait();                  /* blocks the host until the work is done */
    /* Before reading the host's memory: earlier work of the stream writes there first. */
    void settle(const at::Tensor &host);
    /* The host's memory gets what is `staged` when somebody waits for this stream, not before. */
    void write_late(const at::Tensor &host, at::Tensor staged);
    /* The host's memory must stay as it is until somebody has waited for this stream. */
    void read_late(const at::Tensor &host);

  private:
    void add(const at::Tensor &tensor, bool write);
    void add(const void *block, size_t begin, size_t end, bool write);
    int stream_, other_ = -1;
    uint64_t count_ = 0;
    std::vector<std::unique_lock<std::mutex>> held_;
    std::vector<std::pair<Use, const void *>> uses_;
};

c10::Stream current_stream(int device);
int index_of(c10::Stream stream);
bool has_seen(int stream, int other, uint64_t count); /* call with the book held */
uint64_t count_of(int stream);                        /* call with the book held */
void synchronize_device(int device);
const std::vector<std::string> &races();
void forget_races();

const at::Generator &default_generator(int device);
at::Generator on_cpu(const at::Generator &generator); /* what plays a device's generator */

struct Copies {
    std::atomic<int64_t> number{0}, bytes{0};
};
Copies &copies(int from, int to); /* -1 is the CPU */
std::atomic<int64_t> &kernels(int device);
void resize_storage(c10::StorageImpl *storage, size_t bytes);

} // namespace dev
