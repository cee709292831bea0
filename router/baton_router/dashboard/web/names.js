// Names of the workers as people read them: their own, as in their logs, else role and number in the list. Pods
// have names that are too long for a box; the table and the titles have those.

const LONGEST = 20;

export function labels(workers) {
  const counts = {};
  const own = workers.map((worker) => worker.own_name);
  return new Map(
    workers.map((worker) => {
      const number = counts[worker.role] ?? 0;
      counts[worker.role] = number + 1;
      const unique = own.filter((name) => name === worker.own_name).length === 1;
      const shown = worker.own_name && unique && worker.own_name.length <= LONGEST;
      return [worker.name, shown ? worker.own_name : `${worker.role}-${number}`];
    }),
  );
}

// The address, behind the worker's own name where its label is another one.
export function addressOf(worker, label) {
  return worker.own_name && worker.own_name !== label ? `${worker.own_name}, ${worker.name}` : worker.name;
}

export function labelOf(named, name) {
  return named.get(name) ?? name;
}
