// Display names of the workers: role and number, by their position in the list.

const WORDS = { prefill: "Prefill", decode: "Decode", both: "Worker" };

export function labels(workers) {
  const counts = {};
  return new Map(
    workers.map((worker) => {
      counts[worker.role] = (counts[worker.role] ?? 0) + 1;
      return [worker.name, `${WORDS[worker.role] ?? "Worker"} ${counts[worker.role]}`];
    }),
  );
}

export function labelOf(named, name) {
  return named.get(name) ?? name;
}
