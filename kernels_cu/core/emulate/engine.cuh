// The GPU on a CPU: what the emulated words of core/ stand on. g++ alone reads this; block.cpp implements it.
//
// The threads of a block are fibers on one CPU thread. A fiber runs until it reaches a collective, waits there until
// everyone whom the collective concerns has come, and goes on. Nothing else interrupts it: one seed, one execution.
#pragma once
#include "core/types.cuh"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

// For what the emulation itself reads and writes: not announced as an access of the kernel's.
#define CF_UNANNOUNCED __attribute__((no_sanitize_thread))

namespace emulate {

struct Thread { u32 index, block, blocks; };      // its number in the block, the block's in the grid, blocks in all
extern __thread Thread* self;      // the fiber that runs now

struct Site { const char *word, *file; int line; };     // a call of a collective

// Waits until all threads of the block are here.
void wait_for_block(Site site);
// Waits until all lanes of the warp are here with their records; the last one runs `complete` on the 32 of them.
void wait_for_warp(Site site, void* record, void (*complete)(void* const* records));
// The same, and what each lane wrote before is ordered before what any lane does after.
void wait_for_warp_in_order(Site site);
// Barrier `id` of the block's sixteen: waits (or, to arrive, does not) until `count` threads have come.
void wait_for_named(Site site, u32 id, u32 count);
void arrive_at_named(Site site, u32 id, u32 count);
// Waits until ready(subject); for words that poll memory. `elsewhere`: another block may make it so.
void wait_until(Site site, bool (*ready)(const void* subject), const void* subject, bool elsewhere = false);

// For the race check: what this thread did so far is past for all who observe the key after.
void publish(const void* key);
void observe(const void* key);

// A copy to shared memory that arrives later: kept with those of this thread since its last group was closed.
void put_off(u32 to, const void* elements, u32 bytes);
void close_group();
// The next copy of all but the youngest `pending` groups, or false.
bool take_up(u32 pending, u32* to, void* elements, u32* bytes);

// Bytes of shared memory that TMA has loaded arrive later in a random execution, in any order: till then they are NaN, and
// arrived(bar, bytes) follows.
void arrive_later(u32 to, u32 bytes, void* bar, void (*arrived)(void* bar, i32 bytes));

// *p += x, one thread at a time.
void add(float* p, float x);
void add(double* p, double x);

// Numbers in global memory that blocks pass on to each other.
u32 increment(u32* p);
u32 load_acquire(const u32* p);
void wait_for_count(Site site, const u32* p, u32 x);

// The block's shared memory; a fault if the launch gives less than `bytes`.
char* shared_memory(u64 bytes);

// Ends the launch with a message that names kernel, block and thread.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Calls kernel(*args[0], *args[1], ...), each of its parameter's type.
template <int... n> struct Numbers {};
template <int count, int... n> struct CountTo : CountTo<count - 1, count - 1, n...> {};
template <int... n> struct CountTo<0, n...> { using type = Numbers<n...>; };
template <class... Parameters, int... n>
CF_UNANNOUNCED void call(void (*kernel)(Parameters...), void* const* args, Numbers<n...>) {
  kernel(*static_cast<const Parameters*>(args[n])...);
}
template <class... Parameters> void call(void (*kernel)(Parameters...), void* const* args) {
  call(kernel, args, typename CountTo<sizeof...(Parameters)>::type{});
}
// Writes the bytes of each parameter, ended by 0.
template <class... Parameters> void parameter_bytes(void (*)(Parameters...), u32* bytes) {
  const u32 all[] = {u32(sizeof(Parameters))..., 0};
  for (u32 size : all) *bytes++ = size;
}

}  // namespace emulate
