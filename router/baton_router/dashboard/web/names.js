// Names of the workers as people read them: their own, as in their logs, else role and number in the list, without
// the numbers that others have in their own names. Pods have names that are too long for a box; the table and the
// titles have those.

const LONGEST = 20;

export function labels(workers) {
  const counts = {};
  const own = workers.map((worker) => worker.own_name);
  const unique = (name) => own.indexOf(name) === own.lastIndexOf(name);
  const shown = new Set(own.filter((name) => name && name.length <= LONGEST && unique(name)));
  return new Map(
    workers.map(({ name, own_name, role }) => {
      let number = counts[role] ?? 0;
      while (!shown.has(own_name) && shown.has(`${role}-${number}`)) number += 1;
      counts[role] = number + 1;
      return [name, shown.has(own_name) ? own_name : `${role}-${number}`];
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
