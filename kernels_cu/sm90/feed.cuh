// The threads that keep the consumers supplied: the scheduler prepares pieces of work, one producer loads queries and
// keys, another values, each as soon as there is room. And the barriers through which they all speak.
#pragma once
#include "sm90/tiles.cuh"

constexpr i32 kLead = 3;        // key tiles that are still to be loaded when the next piece of work is asked for
static_assert(kThreads == 128 * (kConsumers + 1), "a producer and the consumers");

// Dropout: what Philox makes of the columns of a key tile, for all rows. Comes and goes with the tile's values.
template <bool kAny> struct ColumnParts {
  CF_DEVICE u32 columns_at(u32, i32) const { return 0; }
  CF_DEVICE void fill_columns(u32, const DropoutStream&, i32) {}
};
template <> struct ColumnParts<true> {
  alignas(16) u32 column_parts[kStagesV][kBlockKV / 4][4];         // by counter

  CF_DEVICE u32 columns_at(u32 stage, i32 n) const { return shared_address(column_parts[stage][n]); }
  CF_DEVICE void fill_columns(u32 stage, const DropoutStream& stream, i32 col) {
    for (i32 n = thread_index() % 32; n < kBlockKV / 4; n += 32) {
      Words counter = stream.counter_of(0, u32(col + stream.origin_j));
      counter.word[0] += n;
      st_shared_128(columns_at(stage, n), column_part(counter, stream.key0, stream.key1).word);
    }
    warp_barrier();                            // all lanes have written: one may say so
  }
};

// Ready barriers end a phase when what they are named after may be read, free barriers when all have read it.
struct Control : ColumnParts<kDropout> {
  u64 work_wanted, work_ready[kWorkSlots], work_free[kWorkSlots], q_ready[kQStages], q_free[kQStages];
  u64 k_ready[kStages], k_free[kStages], v_ready[kStagesV], v_free[kStagesV];
  u64 addends_ready[kConsumers][kPlaces], addends_free[kConsumers][kPlaces];
  Work work[kWorkSlots];
};

CF_DEVICE void initialise(Control& control) {
  mbarrier_init(control.work_wanted, 1);
  for (i32 n = 0; n < kWorkSlots; ++n) {
    mbarrier_init(control.work_ready[n], 1), mbarrier_init(control.work_free[n], 4 * kConsumers + 2 + kMaskOrBias);
  }
  for (i32 n = 0; n < kQStages; ++n) {
    mbarrier_init(control.q_ready[n], 1), mbarrier_init(control.q_free[n], 4 * kConsumers);
  }
  for (i32 n = 0; n < kStages; ++n) {
    mbarrier_init(control.k_ready[n], 1), mbarrier_init(control.k_free[n], 4 * kConsumers);
  }
  for (i32 n = 0; n < kStagesV; ++n) {
    mbarrier_init(control.v_ready[n], 1), mbarrier_init(control.v_free[n], 4 * kConsumers);
  }
  for (i32 n = 0; n < kConsumers * kPlaces; ++n) {
    mbarrier_init(control.addends_ready[n / kPlaces][n % kPlaces], 1);
    mbarrier_init(control.addends_free[n / kPlaces][n % kPlaces], 4);
  }
  fence_mbarrier_init();
}

// ---- producers: a thread each, a warp for values beside dropout; the scheduler is sm90/pipeline.cuh's

struct Producer {
  const TensorMaps& maps;
  Control& control;
  u32 tiles;
  Ring<kQStages> q{0, 1};
  Ring<kStages> k{0, 1};
  Ring<kStagesV> v{0, 1};

  // Values have a warp beside dropout, else a thread.
  static CF_DEVICE bool leads() { return !kDropout || thread_index() % 32 == 0; }

  CF_DEVICE void load_k(const Work& work, i32 n) {
    mbarrier_try_wait_parity(barrier(control.k_free, k.stage), k.parity);        // all consumers have read the stage
    const u32 to = tiles + kKAt + k.stage * kKBytes;
    load_tile<kBlockKV, kPanels>(to, maps.k, barrier(control.k_ready, k.stage), n * kBlockKV, work.head_kv, work);
    k.advance();
  }
  CF_DEVICE void load_v(const Work& work, i32 n) {
    mbarrier_try_wait_parity(barrier(control.v_free, v.stage), v.parity);
    control.fill_columns(v.stage, work.dropout, n * kBlockKV);
    const u32 to = tiles + kVAt + v.stage * kVBytes;
    const u32 ready = barrier(control.v_ready, v.stage);
    if (leads()) load_tile<kBlockKV, kPanelsV>(to, maps.v, ready, n * kBlockKV, work.head_kv, work);
    v.advance();
  }
  CF_DEVICE void load_q(const Work& work) {
    mbarrier_try_wait_parity(barrier(control.q_free, q.stage), q.parity);
    const u32 to = tiles + kQAt + q.stage * kQBytes;
    load_tile<kBlockQ, kPanels>(to, maps.q, barrier(control.q_ready, q.stage), work.row, work.head, work);
    q.advance();
  }

  CF_DEVICE void load_queries_and_keys(const Work& work) {
    if (kOutApart && work.last < work.first) return;
    if (work.last >= work.first) load_k(work, work.tile(work.last));
    load_q(work);
    CF_UNROLL_1
    for (i32 n = work.last - 1; n >= work.first; --n) {
      if (n == work.first + kLead - 1 && n < work.last - 1) ask();
      load_k(work, work.tile(n));
    }
  }
  CF_DEVICE void load_values(const Work& work) {
    CF_UNROLL_1
    for (i32 n = work.last; n >= work.first; --n) load_v(work, work.tile(n));
  }
  CF_DEVICE void ask() { mbarrier_arrive(shared_address(&control.work_wanted)); }
};

template <bool kValues> CF_DEVICE void produce(const TensorMaps& maps, Control& control, u32 tiles) {
  Producer producer{maps, control, tiles};
  Ring<kWorkSlots> slot{0, 0};
  while (true) {
    const Work& work = control.work[slot.stage];
    mbarrier_try_wait_parity(shared_address(&control.work_ready[slot.stage]), slot.parity);
    if (work.number < 0) break;
    if (kValues) producer.load_values(work); else producer.load_queries_and_keys(work);
    if (kValues && kDropout) warp_barrier();   // all lanes have read
    if (Producer::leads()) mbarrier_arrive(shared_address(&control.work_free[slot.stage]));
    slot.advance();
  }
}

// kCount boxes of 64 rows, side by side.
template <i32 kCount, i32 kBox>
CF_DEVICE void load_boxes(u32 to, const TensorMap& map, u32 bar, i32 col, i32 row, const Work& work) {
  CF_UNROLL
  for (i32 n = 0; n < kCount; ++n) {
    const i32 first = col + n * (kBox / 2);
    cp_async_bulk_tensor_5d_load(to + n * 64 * kBox, map, bar, first, row, work.head, work.lead(0), work.lead(1));
  }
}

// The producer of masks and biases: for all consumers, each in its own time.
CF_DEVICE void produce_addends(const Params& p, const TensorMaps& maps, Control& control, u32 at) {
  Ring<kWorkSlots> slot{0, 0};
  u32 places = 0, parities = ~0u;              // a bit for each consumer
  while (true) {
    const Work& work = control.work[slot.stage];
    mbarrier_try_wait_parity(shared_address(&control.work_ready[slot.stage]), slot.parity);
    if (work.number < 0) break;
    const Bias bias = bias_of(p, work.addends);
    const bool masked = mask_comes(p, work.addends);
    const u32 bytes = (masked ? kMaskPlace : 0) + (bias == Bias::kOwn ? 1 : bias == Bias::kFloat ? 2 : 0) * kBiasPlace;
    CF_UNROLL_1
    for (i32 step = work.last; step >= work.first; --step) {
      CF_UNROLL_1
      for (i32 consumer = 0; consumer < kConsumers; ++consumer) {
        if (step > work.keys[consumer].last) continue;
        const u32 bit = 1u << consumer, place = (places & bit) != 0, ready = barrier(control.addends_ready[consumer], place);
        mbarrier_try_wait_parity(barrier(control.addends_free[consumer], place), (parities & bit) != 0);
        const AddendPlace to(at, consumer, place);
        const i32 key = work.tile(step) * kBlockKV, row = work.row + 64 * consumer;
        mbarrier_arrive_expect_tx(ready, bytes);
        if (masked) load_boxes<1, kMaskBox>(to.mask, maps.mask, ready, key / 2, row, work);
        if (bias == Bias::kOwn) load_boxes<kBiasBoxes, kBiasBox>(to.bias, maps.bias, ready, key, row, work);
        if (bias == Bias::kFloat) {
          load_boxes<kWideBoxes, kWideBox>(to.wide, maps.bias, ready, 2 * key, row, work);
        }
        if (place + 1 == u32(places_of(bias))) places &= ~bit, parities ^= bit; else places |= bit;
      }
    }
    mbarrier_arrive(shared_address(&control.work_free[slot.stage]));
    slot.advance();
  }
}
